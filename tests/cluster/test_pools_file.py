"""Files that describe pools of chips, or a lab's hosts, as what plans are made for."""

from pathlib import Path

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.cluster_file import Core, read_cluster, read_view
from weft.config.errors import ConfigError, ConfigErrors

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/clusters").glob("*.yaml"))
POOL = "pools:\n  - {chip: H100-SXM5-80GB, chips_per_node: 8}\n"
OWN = """\
chips:
  - name: N1
    peak_tflops: {bf16: 300}
    memory_gib: 64
    memory_gb_s: 1600
    link_gb_s: 200
pools:
  - {chip: N1, chips_per_node: 8, nodes: 2, network_gbit: 200}
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_complete(path: Path) -> None:
    view = read_view(path)
    assert all(pool.link_bytes_s > 0 and pool.network_bytes_s > 0 for pool in view.pools)
    assert path.read_text().startswith("# ")


def test_ten_thousand_chips_of_three_kinds() -> None:
    view = read_view(next(path for path in EXAMPLES if path.stem == "mix-10k"))
    assert view.world_size == 10_000
    assert len({pool.chip.name for pool in view.pools}) == 3


def test_a_pool_takes_from_the_file_before_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "pools:\n"
        "  - {chip: A100-SXM4-80GB, nodes: 3, chips_per_node: 4, price_per_hour: 1.5}\n"
        "  - {chip: A100-SXM4-80GB, nodes: 1, chips_per_node: 8, network_gbit: 80, link_gb_s: 100,"
        " oversubscription: 2, latency_us: 25}\n"
    )
    first, second = read_view(file).pools
    assert first.chip == catalogue()["A100-SXM4-80GB"]
    assert (first.num_nodes, first.chips_per_node, first.price_per_hour) == (3, 4, 1.5)
    assert (first.link_bytes_s, first.network_bytes_s) == (300e9, 25e9)
    assert (second.link_bytes_s, second.network_bytes_s) == (100e9, 5e9)
    assert second.network_latency_s == 25e-6


def test_a_package_is_as_many_ranks_as_software_sees_devices(tmp_path: Path) -> None:
    """Four MI250X are eight devices of 64 GiB; what is said of a package is halved,
    and each device fails half as often."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "pools:\n"
        "  - {chip: MI250X, nodes: 2, chips_per_node: 4, network_gbit: 200, price_per_hour: 3,"
        " mtbf_hours: 4000, link_gb_s: 300}\n"
        "  - {chip: MI250X-GCD, nodes: 2, chips_per_node: 8, network_gbit: 100,"
        " price_per_hour: 1.5, mtbf_hours: 8000, link_gb_s: 150}\n"
    )
    (both,) = read_view(file).pools  # they are alike
    assert (both.num_chips, both.chip.memory_gib) == (32, 64)
    assert (both.price_per_hour, both.mtbf_hours) == (1.5, 8000)
    assert both.chip.peak_flops("bf16") == 191.5e12
    file.write_text("pools:\n  - {chip: MI250X, chips_per_node: 1, link_gb_s: 4000}\n")
    with pytest.raises(ConfigErrors, match=r"link_gb_s = 4000.0: expected at most .* \(3280\)"):
        read_view(file)


def test_an_own_chip(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(OWN)
    (pool,) = read_view(file).pools
    assert (pool.chip.peak_flops("bf16"), pool.chip.memory_gib) == (300e12, 64)
    assert pool.chip.peak_flops("fp16") is None


@pytest.mark.parametrize("vendor", ["NVIDIA", "Nvidia", "nvidia"])
def test_a_vendor_has_one_device_however_it_is_written(vendor: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(OWN.replace("peak_tflops", f"vendor: {vendor}\n    peak_tflops"))
    (pool,) = read_view(file).pools
    assert (pool.chip.vendor, pool.chip.device) == ("NVIDIA", "cuda")


def test_pools_of_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "pools:\n"
        "  - {chip: RTX4090, chips_per_node: 2, node: desk}\n"
        "  - {chip: L40S, chips_per_node: 1}\n"
        "  - {chip: L40S, chips_per_node: 1, node: desk}\n"
        "  - {chip: L40S, chips_per_node: 2}\n"
    )
    view = read_view(file)
    assert [view.node_of(rank) for rank in range(6)] == [0, 0, 1, 0, 2, 2]
    assert view.share_a_node((0, 3)) and not view.share_a_node((0, 2))


def test_hosts_of_a_lab_become_pools(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "hosts:\n"
        "  - {name: h1, chips: [{kind: a, speed: 0.5, memory_gib: 2}]}\n"
        "  - {name: h2, chips: [{kind: a, speed: 0.5, memory_gib: 2}]}\n"
        "  - {name: h3, node: n, chips: [{kind: b}, {kind: b}, {kind: a, speed: 0.5}]}\n"
        "  - {name: h4, node: n, chips: [{kind: b}]}\n"
        "links: {inside: {gbit: 8}, between: {gbit: 2, latency_ms: 1}}\n"
    )
    view = read_view(file, core=Core(tflops=0.1, memory_gib=3))
    counts = [(p.chip.name, p.num_nodes, p.chips_per_node, p.speed) for p in view.pools]
    assert counts == [("a", 2, 1, 0.5), ("b", 1, 2, 1), ("a", 1, 1, 0.5), ("b", 1, 1, 1)]
    assert [view.node_of(rank) for rank in range(6)] == [0, 1, 2, 2, 2, 2]
    assert [pool.chip.memory_gib for pool in view.pools] == [2, 3, 3, 3]
    assert view.pools[0].chip.peak_flops("fp32") == 0.05e12
    assert view.pools[0].network_bytes_s == 0.25e9  # of a host alone
    assert view.pools[1].network_bytes_s == 0.0625e9  # four chips share the node's way out
    assert view.pools[1].link_bytes_s == 1e9
    assert view.pools[0].network_latency_s == pytest.approx(1e-3, rel=0.1)


NESTED = (
    POOL.replace("8}", "8, site: a}")
    + POOL.replace("pools:\n", "").replace("8}", "8, site: b}")
    + "sites: [{name: a, gbit: 9, inside: c}, {name: b, gbit: 9, inside: c}, {name: c, gbit: 1}]\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            POOL.replace("H100-SXM5-80GB", "h100-sxm"),
            "pools[0].chip = 'h100-sxm': expected a chip of the catalogue, or one described under "
            "chips. Did you mean H100-SXM5-80GB?\n      at c.yaml:2",
        ),
        (
            POOL.replace("H100-SXM5-80GB", "TPUv4").replace("8}", "8, nodes: 2}"),
            "pools[0].network_gbit = null: expected a number > 0. "
            "The catalogue does not know it for TPUv4: give it here.",
        ),
        (
            POOL.replace("H100-SXM5-80GB", "R300"),
            "pools[0].link_gb_s = null: expected a number > 0. "
            "The catalogue does not know it for R300: give it here.",
        ),
        (
            POOL.replace("H100-SXM5-80GB", "RTX4900"),
            "pools[0].chip = 'RTX4900': expected a chip of the catalogue, or one described under "
            "chips. Did you mean RTX4090?",
        ),
        (
            POOL + "links: {between: {gbit: 1}}\n",
            "links = 'links': expected no links beside pools. "
            "A pool says network_gbit and link_gb_s itself.",
        ),
        (
            POOL + "hosts:\n  - {name: h1, chips: [{kind: a}]}\n",
            "pools = '1 pools': expected no pools beside hosts. "
            "A lab has hosts; what is only planned for has pools.",
        ),
        ("links: {}\n", "pools = null: expected pools of chips, or hosts that a lab plays."),
        (
            "hosts:\n  - {name: h1, chips: [{kind: a}]}\n" + OWN.partition("pools")[0],
            "chips = '1 chips': expected no chips beside hosts. "
            "Hosts say speed and memory_gib of each chip.",
        ),
        (
            POOL.replace("8}", "8, nodes: 2, node: a}"),
            "pools[0].nodes = 2: expected 1 beside node, which names one machine.",
        ),
        (
            OWN.replace("bf16: 300", "bf16: 3.0e14"),
            "chips[0].peak_tflops.bf16 = 300000000000000.0: "
            "expected a number > 0 and <= 100000, or null.",
        ),
        (
            OWN.replace("bf16: 300", "fp8: 300"),
            "chips[0].peak_tflops = {fp8: 300.0}: expected a number for bf16, fp16 or fp32.",
        ),
        (
            OWN.replace("memory_gib: 64", "memory_gib: 68719476736"),
            "chips[0].memory_gib = 68719476736: expected a number > 0 and <= 10000.",
        ),
        (
            OWN.replace("memory_gb_s: 1600", "memory_gb_s: 1.6"),
            "chips[0].memory_gb_s = 1.6: expected 10^9 bytes/s, 60 to 6e+05. With 300 TFLOP/s "
            "that is 1.88e+05 FLOP for each byte of memory moved.\n      at c.yaml:5",
        ),
        (
            OWN.replace("    memory_gb_s: 1600\n", ""),
            "chips[0].memory_gb_s = null: expected a number > 0 and <= 100000. It has to be given.",
        ),
        (
            OWN.replace("link_gb_s: 200", "link_gb_s: 3200"),
            "chips[0].link_gb_s = 3200.0: expected at most memory_gb_s (1600). "
            "Are these 10^9 bits/s?",
        ),
        (
            OWN.replace("    link_gb_s: 200\n", ""),
            "pools[0].link_gb_s = null: expected a number > 0. "
            "The catalogue does not know it for N1: give it here.",
        ),
        (
            OWN.replace("N1", "T4"),
            "chips[0].name = 'T4': expected a name of its own. This one is taken.",
        ),
        (
            POOL.replace("8}", "8, network_gb: 50}"),
            "unknown key 'pools[0].network_gb': did you mean 'pools[0].network_gbit'?",
        ),
        (
            POOL.replace("8}", "8, network_gbit: 4.0e11}"),
            "pools[0].network_gbit = 400000000000.0: "
            "expected a number from 0.01 to 10000, or null.\n      at c.yaml:2",
        ),
        (
            POOL.replace("8}", "8, network_gbit: 50000}"),  # 10^6 bytes/s
            "pools[0].network_gbit = 50000: expected a number from 0.01 to 10000, or null.",
        ),
        (
            POOL.replace("8}", "8, link_gb_s: 3600}"),
            "pools[0].link_gb_s = 3600.0: expected at most memory_gb_s (3350). "
            "Are these 10^9 bits/s?\n      at c.yaml:2",
        ),
        (
            POOL.replace("8}", "8, nodes: 10000000}"),
            "pools[0].nodes = 10000000: expected an integer from 1 to 1000000.",
        ),
        (
            POOL.replace("8}", "4096, nodes: 1000000}"),
            "pools = '4,096,000,000 chips': expected at most 10,000,000 chips.",
        ),
        (POOL.replace("8}", "0}"), "pools[0].chips_per_node = 0: expected an integer from 1 to "),
        (
            POOL.replace("8}", "8, price_per_hour: -2}"),
            "pools[0].price_per_hour = -2: expected a number from 0 to 1000000000, or null.",
        ),
        (
            POOL.replace("8}", "8, price_per_hour: 1.0e+308}"),
            "pools[0].price_per_hour = 1e+308: expected a number from 0 to 1000000000, or null.",
        ),
        (
            "[1, 2]\n",
            "CLUSTER = 'c.yaml': expected a section with keys of hosts, links (a lab), "
            "or of pools, chips, sites (to plan for). It is a list.\n      at c.yaml:1",
        ),
        ("H100\n", "sites (to plan for). It is one value.\n      at c.yaml:1"),
        (
            POOL.replace("8}", "8, site: a}"),
            "pools[0].site = 'a': expected null where the file has no sites.",
        ),
        (
            POOL + "sites: [{name: a, gbit: 1}, {name: b, gbit: 1}]\n",
            "pools[0].site = null: expected one of a, b.",
        ),
        (
            POOL.replace("8}", "8, site: a}") + "sites: [{name: a, gbit: 1}]\n",
            "sites = ['a']: expected two names or more, each once, or no sites.",
        ),
        (
            POOL.replace("8}", "8, site: a}") + "sites: [{name: a, gbit: 1}, {name: b, gbit: 1}]\n",
            "sites[1].name = 'b': expected a site that some pool is at (pools[].site), or that "
            "another is inside.",
        ),
        (
            NESTED.replace("inside: c", "inside: d"),
            "sites[0].inside = 'd': expected one of b, c.",
        ),
        (
            NESTED.replace("gbit: 1}", "gbit: 1, inside: a}"),
            "sites[0].inside = 'c': expected null: all others are inside it.",
        ),
        (
            POOL.replace("8}", "4, site: a, node: n}")
            + "  - {chip: L40S, chips_per_node: 4, site: b, node: n}\n"
            + "sites: [{name: a, gbit: 1}, {name: b, gbit: 1}]\n",
            "pools[1].site = 'b': expected a, where node n is.",
        ),
        (
            "hosts:\n  - {name: h1, chips: [{kind: a}]}\nsites: [{name: a, gbit: 1}]\n",
            "sites = '1 sites': expected no sites beside hosts. "
            "Hosts of one node are a site: links.between joins nodes.",
        ),
        ("pools: []\n", "pools = []: expected a list of one or more sections with keys of chip, "),
    ],
)
def test_what_cannot_be_meant_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        read_view(Path("c.yaml"))
    assert message in str(caught.value)
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.yaml", None, "expected a YAML file that describes a cluster. No such file"),
        (".", None, "expected a YAML file that describes a cluster. Is a directory"),
        ("c.yaml", b"\xff\xfe\x00\x81", "expected a YAML file. It is not UTF-8 text."),
        ("c.yaml", b"", "or of pools, chips, sites (to plan for). It is empty."),
    ],
)
def test_what_is_no_cluster_file(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_view(file)
    assert str(caught.value).startswith(f"CLUSTER = '{file}': expected ")
    assert message in str(caught.value)


def test_a_lab_plays_no_pools(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(POOL)
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    assert str(caught.value) == (
        f"CLUSTER = '{file}': expected a file with hosts, not pools. "
        "No machine can play data-sheet chips; `weft plan --cluster` plans for them."
    )
