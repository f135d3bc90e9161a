"""However a lab ends, nothing is left: by a signal, or by SIGKILL and `weft lab clean`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.lab_cases import alive, needs_root, own_labs, program, written

from weft.cli.main import run
from weft.lab.cgroups import groups_of_labs

pytestmark = needs_root

TIMEOUT_S = 300.0
CLUSTER = """\
hosts:
  - {name: h1, chips: [{kind: big, speed: 0.5}]}
  - {name: h2, chips: [{kind: small, speed: 0.4, memory_gib: 0.2}]}
links: {between: {latency_ms: 1}}
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@contextmanager
def lab_of_two(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A lab whose ranks wait for SIGTERM, once both run and have a child."""
    (folder / "two.yaml").write_text(CLUSTER)
    words = ["-m", "weft", "lab", str(folder / "two.yaml"), "--out", str(folder), *options]
    with (folder / "errors").open("wb") as errors:  # a pipe would be held open by what is left
        process = subprocess.Popen(
            [sys.executable, *words, "--", *program("wait", folder)],
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    try:
        until(lambda: all((folder / f"rank{rank}.json").exists() for rank in (0, 1)))
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def processes(folder: Path) -> list[int]:
    """The ranks and their children."""
    return [pid for rank in (0, 1) for pid in written(folder, rank).values()]


def relay_of(process: subprocess.Popen[bytes], folder: Path) -> int:
    """What carries frames over late links."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (relay,) = {int(pid) for pid in children} - set(processes(folder))
    return relay


@pytest.mark.usefixtures("default_hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lab_that_is_asked_to_stop_asks_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    with lab_of_two(tmp_path) as process:
        pids = [*processes(tmp_path), relay_of(process, tmp_path)]
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
    assert [written(tmp_path, rank) for rank in (0, 1)] == ["asked", "asked"]
    assert "asking the ranks to stop" in (tmp_path / "errors").read_text()
    assert not any(alive(pid) for pid in pids)
    assert own_labs(process.pid) == []


def test_a_killed_lab_takes_its_ranks_along_and_clean_removes_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it runs, `clean` leaves it alone and no other lab has its folder; what its disk held
    is in the folder at the end."""
    (tmp_path / "checkpoints").mkdir(mode=0o750)
    (tmp_path / "checkpoints/old").write_text("old")
    with lab_of_two(tmp_path, "--fault", "at=10min disk full") as process:
        pids = [*processes(tmp_path), relay_of(process, tmp_path)]
        assert run(["lab", "clean"]) == 0
        assert f"left alone, as it still runs: lab of process {process.pid}: " in (
            capsys.readouterr().out
        )
        assert run(["lab", "clean", "--json"]) == 0
        there = json.loads(capsys.readouterr().out)
        counts = {"control_groups": 2, "disks": 1, "network_namespaces": 3}
        assert {"pid": process.pid, **counts} in there["running"]
        assert all(alive(pid) for pid in pids)
        again = ["lab", str(tmp_path / "two.yaml"), "--out", str(tmp_path), "--", "true"]
        assert run(again) == 2
        said = capsys.readouterr().err
        assert "expected a run folder in which no other lab runs. Choose another." in said
        assert "another lab runs: its chips share the cores" in said
        (tmp_path / "checkpoints/new").write_text("new")
        process.kill()
        process.wait(TIMEOUT_S)
        until(lambda: not any(alive(pid) for pid in pids[::2]))
    assert [len(lab.namespaces) for lab in own_labs(process.pid)] == [3]
    assert json.loads((tmp_path / "lab.json").read_text())["exit_code"] is None
    job = ["lab", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "other"), "--", "true"]
    assert run(job) == 0
    left = f"left things of process {process.pid}: 2 control groups, 1 disk, 3 network namespaces"
    assert f"{left}; run `weft lab clean`" in capsys.readouterr().err
    assert run(["lab", "clean"]) == 0
    assert f"removed what was left of process {process.pid}: " in capsys.readouterr().out
    assert not any(alive(pid) for pid in pids)
    assert own_labs(process.pid) == []
    assert not [path for path in groups_of_labs() if f"-{process.pid}-" in path.name]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"old", "new"}
    assert (tmp_path / "checkpoints").stat().st_mode & 0o7777 == 0o750
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert not list(tmp_path.glob(".checkpoints*"))


def test_the_command_is_the_one_that_runs_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`weft` needs no search path; with --json, standard output is one object. What trains
    writes to the lab's folder."""
    (tmp_path / "two.yaml").write_text(CLUSTER.replace(", memory_gib: 0.2", ""))
    words = ["lab", str(tmp_path / "two.yaml"), "--out", str(tmp_path), "--json"]
    assert run([*words, "--", "weft", "train", "no-such-recipe"]) == 2
    printed = capfd.readouterr()
    record = json.loads(printed.out)
    assert record["exit_code"] == 2
    weft, job = [sys.executable, "-m", "weft"], ["train", "no-such-recipe", "--out", str(tmp_path)]
    assert record["command"] == [*weft, *job]
    assert "unknown recipe 'no-such-recipe'" in printed.err
    assert os.environ.get("RANK") is None
