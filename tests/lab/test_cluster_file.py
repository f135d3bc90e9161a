"""Clusters as files: what they hold, and what a wrong one is told."""

from pathlib import Path

import pytest

from weft.cluster.cluster import Node
from weft.cluster.cluster_file import ClusterFile, read_cluster
from weft.config.errors import ConfigError, ConfigErrors
from weft.lab.lab import refuse_too_much

EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples/clusters").glob("*.yaml"))
    if "hosts:" in path.read_text()
]
MACHINE = Node(host="a", cpu="x", cores=2, memory_gib=16, cpu_bf16=False)
HOST = "hosts:\n  - name: h1\n    chips: [{kind: a}]\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_two_cores(path: Path) -> None:
    cluster = read_cluster(path)
    refuse_too_much(cluster, MACHINE)
    assert path.read_text().startswith("# ")


def test_ranks_and_nodes_follow_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "hosts:\n"
        "  - {name: h1, node: n, chips: [{kind: a, speed: 0.5}, {kind: b}]}\n"
        "  - {name: h2, chips: [{kind: c, memory_gib: 2}]}\n"
        "  - {name: h3, node: n, chips: [{kind: a}]}\n"
        "links: {inside: {gbit: 10}, between: {gbit: 1, latency_ms: 2}}\n"
    )
    cluster = read_cluster(file)
    assert cluster.world_size == 4
    assert cluster.nodes == ((0, 2), (1,))
    assert [cluster.ranks_of(host) for host in range(3)] == [range(2), range(2, 3), range(3, 4)]
    assert [(host, chip.kind) for host, chip in cluster.by_rank] == [
        (0, "a"),
        (0, "b"),
        (1, "c"),
        (2, "a"),
    ]
    assert (cluster.links.between.gbit, cluster.links.between.latency_ms) == (1, 2)
    assert cluster.links.inside.latency_ms == 0


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            HOST + "link: {between: {gbit: 1}}\n",
            [
                "unknown key 'link.between.gbit': "
                "did you mean 'links.between.gbit'?\n      at c.yaml:4"
            ],
        ),
        (
            HOST.replace("kind: a", "kind: a, sped: 0.4"),
            [
                "unknown key 'hosts[0].chips[0].sped': "
                "did you mean 'hosts[0].chips[0].speed'?\n      at c.yaml:3"
            ],
        ),
        (
            HOST.replace("kind: a", "kind: a, batch: 4"),
            [
                "unknown key 'hosts[0].chips[0].batch': "
                "the keys here are kind, speed, memory_gib.\n      at c.yaml:3"
            ],
        ),
        (
            HOST.replace("kind: a", "speed: 2"),
            [
                "hosts[0].chips[0].kind = null: expected text. It has to be given.",
                "hosts[0].chips[0].speed = 2: expected a number from 0.01 to 1.0.",
            ],
        ),
        (
            HOST.replace("h1", "h-1"),
            [
                "hosts[0].name = 'h-1': expected a small letter, then at most 11 small letters "
                "and digits. Faults write links as NAME-NAME."
            ],
        ),
        (
            HOST + HOST.partition("\n")[2],
            ["hosts[1].name = 'h1': expected a name of its own. hosts[0] has the same."],
        ),
        ("hosts: []\n", ["hosts = []: expected a list of one or more sections with keys of name"]),
        ("- a\n", ["expected a section with keys of hosts, links"]),
        ("hosts: [\n", ["this is not YAML"]),
        (
            HOST + "links: {inside: {gbit: 0}}\n",
            ["links.inside.gbit = 0: expected a number > 0, or null."],
        ),
        (
            HOST + "links: {between: {gbit: 1e-9}}\n",
            ["links.between.gbit = 1e-09: expected a number from 0.00001 to 10000, or null."],
        ),
        (
            HOST + "links: {inside: {gbit: 40000}}\n",
            [
                "links.inside.gbit = 40000.0: expected a number from 0.00001 to 10000, or null. "
                "With null it is as fast as the machine can.\n      at c.yaml:4"
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    text: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        read_cluster(Path("c.yaml"))
    for problem in problems:
        assert problem in str(caught.value)
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory."),
        (b"", "It is empty."),
        (b"\xff\xfe", "It is not UTF-8 text."),
    ],
)
def test_a_file_that_cannot_be_read(content: bytes | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    assert str(caught.value).startswith(f"CLUSTER = '{file}': expected a ")
    assert str(caught.value).endswith(problem)


def chips(*each: dict[str, object]) -> ClusterFile:
    hosts = [{"name": "h1", "chips": [{"kind": "a", **chip} for chip in each]}]
    return ClusterFile.model_validate({"hosts": hosts})


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    refuse_too_much(chips({"speed": 1.0}, {"speed": 0.7}, {"speed": 0.3}), MACHINE)
    with pytest.raises(ConfigError) as caught:
        refuse_too_much(chips({"speed": 1.0}, {"speed": 1.0}, {"speed": 0.5}), MACHINE)
    assert str(caught.value) == (
        "speed = [1.0, 1.0, 0.5]: expected speeds that add up to at most 2, the cores of this "
        "machine. They add up to 2.5; with 0.8 of each they would fit."
    )
    with pytest.raises(ConfigError) as caught:
        refuse_too_much(chips(*[{"speed": 1.0}] * 3), MACHINE)
    part = float(str(caught.value).split("with ")[1].split(" of each")[0])
    refuse_too_much(chips(*[{"speed": part}] * 3), MACHINE)
    refuse_too_much(chips({"speed": 0.1, "memory_gib": 16}), MACHINE)
    with pytest.raises(ConfigError) as caught:
        refuse_too_much(chips({"memory_gib": 10}, {"memory_gib": 8}), MACHINE)
    assert str(caught.value) == (
        "memory_gib = [10.0, 8.0]: expected at most 16 in all, the memory of this machine. "
        "It adds up to 18."
    )
