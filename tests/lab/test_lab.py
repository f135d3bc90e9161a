"""Real namespaces, links, quotas and faults: each is measured from inside, and gone afterwards."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.lab_cases import TWO, hosts, needs_root, own_labs, play, written

from weft.cluster.cluster_file import LEAST_GBIT, MOST_GBIT, ClusterFile, LinkEntry
from weft.config.errors import ConfigError
from weft.lab import relay
from weft.lab.identity import Identity
from weft.lab.network import namespaces
from weft.lab.rehearsal import Rehearsal, rehearse
from weft.lab.tools import call

pytestmark = needs_root


def late(cluster: ClusterFile) -> ClusterFile:
    """With links between its nodes on which all arrives 2 ms later."""
    links = cluster.links.model_copy(update={"between": LinkEntry(latency_ms=2)})
    return cluster.model_copy(update={"links": links})


def when(word: str, file: Path) -> Callable[[str], None]:
    """Tell the ranks that the lab has said something."""
    return lambda text: file.touch() if word in text else None


def test_ranks_are_told_where_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two chips on the first host, one on the second, numbered in the order of the file."""
    cluster = ClusterFile.model_validate(
        {
            "hosts": [
                {"name": "a", "chips": [{"kind": "x", "speed": 0.3}, {"kind": "y", "speed": 0.3}]},
                {"name": "b", "chips": [{"kind": "z", "speed": 0.3, "memory_gib": 0.25}]},
            ]
        }
    )
    outcome = play("told", tmp_path, cluster)
    assert outcome.exit_code == 0
    told = [written(tmp_path, rank) for rank in range(3)]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0"]
    assert [each["LOCAL_WORLD_SIZE"] for each in told] == ["2", "2", "1"]
    assert [each["GROUP_RANK"] for each in told] == ["0", "0", "1"]
    assert {each["MASTER_ADDR"] for each in told} == {"10.77.0.1"}
    assert all(set(each["ports"]) == {"lo", "eth0"} for each in told)
    assert all(told[rank]["groups"].count(f"/rank{rank}\n") >= 1 for rank in range(3))
    assert capfd.readouterr().out == "rank 0 speaks\n"
    assert (tmp_path / "lab/rank2.log").read_text() == "rank 2 speaks\n"
    record = json.loads((tmp_path / "lab.json").read_text())
    assert record == outcome.record
    assert [rank["host"] for rank in record["ranks"]] == ["a", "a", "b"]
    assert [rank["code"] for rank in record["ranks"]] == [0, 0, 0]


def test_links_are_as_slow_and_as_late_as_asked(tmp_path: Path) -> None:
    """6 MB take 0.48 s at 0.1 Gbit/s between nodes, and far less inside one. A byte takes 5 ms each
    way inside a node, 15 to another: half on each of the links that it goes over."""
    chips = hosts(*[{"speed": 0.3}] * 3)
    chips[0]["node"] = chips[1]["node"] = "n"
    links = {"inside": {"gbit": 2, "latency_ms": 5}, "between": {"gbit": 0.1, "latency_ms": 10}}
    cluster = ClusterFile.model_validate({"hosts": chips, "links": links})
    assert play("link", tmp_path, cluster).exit_code == 0
    (inside, between), (near, far) = written(tmp_path, 0)
    assert between > 0.9 * 0.48
    assert inside < between
    assert 0.010 <= near < 0.030 <= far


def test_links_cannot_be_late_without_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(relay.__file__).read_text()
    (tmp_path / "relay.py").write_text(text.replace("/dev/net/tun", "/dev/net/none"))
    monkeypatch.setattr(relay, "__file__", str(tmp_path / "relay.py"))
    with pytest.raises(ConfigError, match=r"latency_ms.*2\.0.*no ports.*/dev/net/none.*`tun`"):
        play("told", tmp_path, late(TWO))
    assert own_labs() == []


def test_chips_are_as_slow_as_asked_and_as_a_fault_makes_them(tmp_path: Path) -> None:
    cluster = ClusterFile.model_validate({"hosts": hosts({"speed": 0.7}, {"speed": 0.25})})
    outcome = play(
        "share",
        tmp_path,
        cluster,
        faults=["step=1 slow rank=1 to=0.1"],
        say=when("fault", tmp_path / "slowed"),
    )
    assert outcome.exit_code == 0
    assert written(tmp_path, 1) > 5, "how often the kernel made the slow one wait"
    (fault,) = outcome.record["faults"]
    assert (fault["after_step"], fault["undone_s"]) == (1, None)


def test_a_chip_has_the_memory_that_was_asked(tmp_path: Path) -> None:
    cluster = ClusterFile.model_validate(
        {"hosts": hosts({"speed": 0.5}, {"speed": 0.4, "memory_gib": 0.1})}
    )
    outcome = play("memory", tmp_path, cluster, grace_s=30)
    assert written(tmp_path, 0) == "survived"
    assert outcome.exit_code == 1
    assert outcome.ranks[1].in_words() == ("was ended by SIGKILL, as its chip was out of memory")


def test_a_cut_link_is_silent_until_it_is_mended(tmp_path: Path) -> None:
    faults = ["step=1 cut link=h1-h2 for=700ms"]
    outcome = play("echo", tmp_path, faults=faults, say=when("over", tmp_path / "told"))
    assert outcome.exit_code == 0
    assert written(tmp_path, 0) > 0.6
    (fault,) = outcome.record["faults"]
    assert fault["undone_s"] - fault["happened_s"] >= 0.7


def test_a_dead_host_says_nothing_and_its_rank_has_not_failed(tmp_path: Path) -> None:
    """Nor do packets that are still on their way to it end the link."""
    (tmp_path / "alone").touch()
    outcome = play(
        "echo",
        tmp_path,
        late(TWO),
        faults=["step=1 kill host=h2"],
        say=when("fault", tmp_path / "told"),
    )
    assert outcome.exit_code == 0
    assert [rank.code for rank in outcome.ranks] == [0, -9]
    assert outcome.ranks[1].in_words() == "was ended by SIGKILL: step=1 kill host=h2"


@pytest.mark.parametrize(("victim", "heard"), [("rank=1", "closed"), ("host=h2", "silence")])
def test_a_dead_process_closes_its_connections_and_a_dead_host_does_not(
    victim: str, heard: str, tmp_path: Path
) -> None:
    """The others have all the time that they need."""
    faults = [f"step=1 kill {victim}"]
    outcome = play("hear", tmp_path, faults=faults, say=when("fault", tmp_path / "gone"))
    assert outcome.exit_code == 0
    assert written(tmp_path, 0) == heard


def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    faults = ["step=1 stop rank=1 for=2s"]
    outcome = play("beat", tmp_path, faults=faults, say=when("over", tmp_path / "over"))
    assert outcome.exit_code == 0
    assert written(tmp_path, 1) > 1.9
    assert written(tmp_path, 0) < written(tmp_path, 1)


def test_nobody_waits_for_a_rank_that_is_stopped_for_good(tmp_path: Path) -> None:
    faults = ["step=1 stop rank=1"]
    outcome = play("beat", tmp_path, faults=faults, say=when("fault", tmp_path / "over"))
    assert outcome.exit_code == 0
    assert outcome.ranks[1].in_words() == "was ended by SIGKILL: step=1 stop rank=1"


def test_a_full_disk_refuses_and_what_it_holds_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/old").write_text("old")
    one = ClusterFile.model_validate({"hosts": hosts({"speed": 0.9})})
    outcome = play("disk", tmp_path, one, faults=["step=1 disk full for=300ms"])
    assert outcome.exit_code == 0
    assert written(tmp_path, 0) == ["old", "full", "room"]
    files = {path.name: path.read_text() for path in (tmp_path / "checkpoints").iterdir()}
    assert set(files.pop("more")) == {"\0"}
    assert files == {"old": "old", "new": "new"}
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert not list(tmp_path.glob(".checkpoints*"))


def test_a_failed_rank_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    """And a fault whose time never comes is named."""
    said: list[str] = []
    outcome = play("fail", tmp_path, faults=["step=5 kill rank=0"], say=said.append)
    assert outcome.exit_code == 3
    assert [fault.text for fault in outcome.missed] == ["step=5 kill rank=0"]
    assert outcome.ranks[0].in_words() == "was ended by SIGKILL: another had failed 0.1 s before"
    assert any("rank 1 ended with exit code 3" in text for text in said)


def test_a_namespace_of_somebody_else_is_refused_and_stays(tmp_path: Path) -> None:
    name = f"{Identity.own().name}-h2"
    call(["ip", "netns", "add", name])
    try:
        with pytest.raises(ConfigError, match=rf"{name}': expected a network namespace that is"):
            play("told", tmp_path)
        assert [found for found in namespaces() if found.startswith(Identity.own().name)] == [name]
    finally:
        call(["ip", "netns", "del", name])


@pytest.mark.parametrize("gbit", [LEAST_GBIT, MOST_GBIT])
def test_any_name_and_any_rate_that_a_file_may_have(gbit: float, tmp_path: Path) -> None:
    chips = hosts({"speed": 0.5}, {"speed": 0.4})
    chips[0]["name"] = "switch"
    links = {"between": {"gbit": gbit}}
    cluster = ClusterFile.model_validate({"hosts": chips, "links": links})
    assert play("told", tmp_path, cluster).exit_code == 0


def test_a_program_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    asked = Rehearsal(cluster=TWO, command=("no-such-program",), out=tmp_path)
    with pytest.raises(ConfigError, match="No such file or directory"):
        rehearse(asked, lambda _: None)
    assert own_labs() == []
