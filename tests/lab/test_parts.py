"""Parts of a lab that need no root: control groups on a made-up tree, steps, names, shaping."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.cli.main import run
from weft.cluster.cluster_file import LinkEntry
from weft.config.errors import RunError
from weft.lab.cgroups import control_groups, groups_of_labs, quota
from weft.lab.disk import mounted
from weft.lab.identity import Identity
from weft.lab.network import host_address, shaping
from weft.lab.ranks import RankProcess
from weft.lab.rehearsal import exit_code
from weft.lab.steps import Steps
from weft.lab.tools import _capabilities_lacking

LAB = Identity(pid=7, started=9)


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """``/proc/self/cgroup`` and the files below ``/sys/fs/cgroup``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("speed", "micros", "period"),
    [(1.0, 5000, 5000), (0.4, 2000, 5000), (0.2, 1000, 5000), (0.1, 1000, 10000)],
)
def test_quota(speed: float, micros: int, period: int) -> None:
    """The kernel takes no quota below a millisecond."""
    assert quota(speed) == (micros, period)


def test_version_two(tmp_path: Path) -> None:
    """Below the nearest group that hands on what is needed; limits in the files of version 2."""
    files = {
        "cgroup.controllers": "cpu io memory",
        "cgroup.subtree_control": "cpu memory pids",
        "user/cgroup.subtree_control": "memory pids",
        "user/session/cgroup.subtree_control": "",
    }
    top = tree(tmp_path, "0::/user/session\n", files)
    groups = control_groups(LAB, tmp_path)
    groups.build(3)
    mine = top / "weft-lab-7-9"
    assert (mine / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (mine / "cpu.weight").read_text() == "10000"  # the most there is
    groups.add(0)
    (mine / "rank0/memory.swap.max").touch()
    groups.set_speed(0, 0.4)
    groups.set_memory(0, 2**20)
    assert (mine / "rank0/cpu.max").read_text() == "2000 5000"
    assert (mine / "rank0/memory.max").read_text() == "1048576"
    assert (mine / "rank0/memory.swap.max").read_text() == "0"
    assert groups.entries(0) == [mine / "rank0/cgroup.procs"]
    assert groups.killed_for_memory(0) == 0
    (mine / "rank0/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert groups.killed_for_memory(0) == 2
    (mine / "rank0/cgroup.procs").write_text("12\n0\n13\n")
    assert groups.processes(0) == {12, 13}
    assert list(groups_of_labs(tmp_path)) == [mine]


def test_version_two_where_nothing_is_handed_on(tmp_path: Path) -> None:
    """The top may be asked to; where it may not, as in a container, that is said."""
    files = {"cgroup.controllers": "cpu memory", "cgroup.subtree_control": ""}
    top = tree(tmp_path, "0::/\n", files)
    control_groups(LAB, tmp_path).build(1)
    assert (top / "cgroup.subtree_control").read_text() == "+cpu +memory"
    (top / "cgroup.subtree_control").unlink()
    (top / "cgroup.subtree_control").mkdir()
    with pytest.raises(RunError, match="no control group above this process hands on `cpu` and"):
        control_groups(LAB, tmp_path)


def test_version_one(tmp_path: Path) -> None:
    """Two hierarchies, each below the own group; a path that is not there is a container's."""
    own = "4:memory:/job\n1:cpu,cpuacct:/outside/of/it\n0::/\n"
    top = tree(tmp_path, own, {"cpu/tasks": "", "memory/job/tasks": ""})
    groups = control_groups(LAB, tmp_path)
    groups.build(2)
    cpu, memory = top / "cpu/weft-lab-7-9", top / "memory/job/weft-lab-7-9"
    assert (cpu / "cpu.shares").read_text() == "102400"
    groups.add(1)
    groups.set_speed(1, 0.1)
    groups.set_memory(1, 2**20)
    assert (cpu / "rank1/cpu.cfs_period_us").read_text() == "10000"
    assert (cpu / "rank1/cpu.cfs_quota_us").read_text() == "1000"
    assert (memory / "rank1/memory.limit_in_bytes").read_text() == "1048576"
    assert groups.entries(1) == [cpu / "rank1/cgroup.procs", memory / "rank1/cgroup.procs"]
    assert sorted(groups_of_labs(tmp_path)) == sorted([cpu, memory])
    groups_again = control_groups(LAB, tmp_path)
    with pytest.raises(RunError, match="cannot be made: File exists"):
        groups_again.build(2)
    groups_again.remove()
    assert cpu.exists()


def test_no_control_groups(tmp_path: Path) -> None:
    tree(tmp_path, "0::/\n", {})
    with pytest.raises(RunError, match="mount /sys/fs/cgroup"):
        control_groups(LAB, tmp_path)


def test_names_say_whose_they_are() -> None:
    own = Identity.own()
    assert own.pid == os.getpid()
    assert own.is_alive()
    assert not Identity(own.pid, own.started + 1).is_alive()
    assert Identity.of_name(f"{own.name}-h1") == own
    assert Identity.of_name(own.name) == own
    assert Identity.of_name(f"x{own.name}") is None
    assert Identity.of_name("weft-lab-5") is None


def test_shaping() -> None:
    """A burst of a millisecond or a packet."""
    assert shaping("p", LinkEntry()) == []
    one = "tbf rate 1000000kbit burst 125000 limit 8388608"
    ten = "tbf rate 10000000kbit burst 1250000 limit 8388608"
    slow = "tbf rate 10000kbit burst 4096 limit 8388608"
    assert shaping("p", LinkEntry(gbit=0.01)) == [f"qdisc add dev p root {slow}"]
    assert shaping("p", LinkEntry(gbit=1)) == [f"qdisc add dev p root {one}"]
    assert shaping("p", LinkEntry(gbit=10, latency_ms=2)) == [f"qdisc add dev p root {ten}"]


def test_addresses_differ() -> None:
    assert host_address(0) == "10.77.0.1"
    assert len({host_address(host) for host in range(2000)}) == 2000


def line(step: int, **more: float) -> str:
    return json.dumps({"step": step, "loss": 1.0, **more}) + "\n"


def test_steps_are_those_of_this_job(tmp_path: Path) -> None:
    """Neither what the file held before, nor evaluations, nor half a line."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(50))
    steps = Steps(file)
    assert steps.look() == 0
    with file.open("a") as more:
        more.write(line(3) + json.dumps({"step": 9, "eval_loss": 1.0}) + "\n" + line(4)[:12])
    assert steps.look() == 3
    with file.open("a") as more:
        more.write(line(4)[12:] + "garbage\n[]\n")
    assert steps.look() == 4
    other = tmp_path / "new"
    other.write_text(line(30) + line(31))
    other.replace(file)
    assert steps.look() == 31


def test_steps_of_a_new_run(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "metrics.jsonl")
    assert steps.look() == 0
    (tmp_path / "metrics.jsonl").write_text(line(1))
    assert steps.look() == 1


class Ended(RankProcess):
    """A rank that has ended so."""

    def __init__(self, code: int, at: float = 0, *, why: str = "", by_fault: bool = False) -> None:
        super().__init__(0, SimpleNamespace(returncode=code), at, why, by_fault)


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([Ended(0), Ended(0)], 0),
        ([Ended(1, 5), Ended(2, 4)], 2),
        ([Ended(0), Ended(-9)], 1),
        ([Ended(0), Ended(-9, by_fault=True)], 0),
        ([Ended(1, 5), Ended(-9, 1, by_fault=True)], 1),
        ([Ended(-9, 1, why="by the lab"), Ended(3, 1)], 3),
        ([Ended(-9, by_fault=True)], 1),
    ],
)
def test_exit_code(ranks: list[RankProcess], code: int) -> None:
    assert exit_code(ranks, was_stopped=False) == code


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([Ended(0), Ended(0)], 0),
        ([Ended(-15), Ended(0)], 75),
        ([Ended(-15, 1), Ended(1, 2)], 75),
        ([Ended(1, 1), Ended(-15, 2)], 1),
        ([Ended(-9, 1), Ended(-15, 2)], 1),
        ([Ended(0), Ended(-9, why="asked to stop twice")], 75),
        ([Ended(75), Ended(-9, by_fault=True)], 75),
    ],
)
def test_exit_code_of_what_was_asked_to_stop(ranks: list[RankProcess], code: int) -> None:
    """Ranks that have not begun to listen are ended by the signal that asks them."""
    assert exit_code(ranks, was_stopped=True) == code


def test_disks_of_labs_among_other_mounts() -> None:
    text = "tmpfs /run tmpfs rw 0 0\nweft-lab-7-9 /a\\040b/c tmpfs rw 0 0\n"
    assert list(mounted(text)) == [("weft-lab-7-9", Path("/a b/c"))]


def test_capabilities_that_a_container_withholds() -> None:
    assert _capabilities_lacking("Name:\tx\nCapEff:\t000001ffffffffff\n") == []
    assert _capabilities_lacking("CapEff:\t00000000a80425fb\n") == [
        "CAP_NET_ADMIN",
        "CAP_SYS_ADMIN",
    ]


CLUSTER = "hosts: [{name: h1, chips: [{kind: a, speed: 0.5}]}]\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["c.yaml"],
            "COMMAND = null: expected a command after `--`. "
            "For example: weft lab CLUSTER.yaml -- weft train debug --out runs/mixed.",
        ),
        (
            ["c.yaml", "--", "weft", "train"],
            "--out = null: expected a run folder, for logs and lab.json. "
            "The command has none: all ranks of a job write to one folder.",
        ),
        (["c.yaml", "--fault", "boom", "--", "true"], "--fault = 'boom': expected one of kill "),
        (["none.yaml", "--", "true"], "CLUSTER = 'none.yaml': expected a YAML file"),
        (
            ["c.yaml", "--out", "/dev/null", "--", "true"],
            "--out = '/dev/null': expected a folder to write to. File exists.",
        ),
        (["clean", "--", "now"], "COMMAND = ['now']: expected nothing after `clean`."),
        (["clean", "--out", "x"], "--out = 'x': expected nothing beside `clean`."),
        (["clean", "--fault", "x"], "--fault = ['x']: expected nothing beside `clean`."),
        (["clean", "--grace", "0"], "--grace = 0.0: expected nothing beside `clean`."),
        (["clean", "--virtual"], "--virtual = true: expected nothing beside `clean`."),
        (["clean", "--predict"], "--predict = true: expected nothing beside `clean`."),
        (["clean", "--gflops", "1"], "--gflops = 1.0: expected nothing beside `clean`."),
    ],
)
def test_refusals(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.cli.lab.why_not_here", lambda: "")
    Path("c.yaml").write_text(CLUSTER)
    assert run(["lab", *words]) == 2
    assert f"error: {says}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_where_no_lab_can_be_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    Path("c.yaml").write_text(CLUSTER)
    assert run(["lab", "c.yaml", "--out", "x", "--", "true"]) == 2
    assert "only root may make network namespaces and control groups" in capsys.readouterr().err
    assert run(["lab", "clean"]) == 2
    assert not Path("x").exists()
