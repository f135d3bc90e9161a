"""Jobs in a lab that take turns: one that is held stands still, and its clock with it."""

import json
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from lab.lab_cases import TWO, needs_root, own_labs

from weft.lab.held import HeldJob, await_ready
from weft.lab.here import Here
from weft.lab.steps import Moment, stands_still

STEPS = """
import itertools, json, os, pathlib, time
out, began = pathlib.Path({out!r}), time.monotonic()
if os.environ["RANK"] == "0":
    event = dict(time="", elapsed_s=0.0, kind="start", step=0, rank=None, message="", facts={{}})
    (out / "events.jsonl").write_text(json.dumps(event) + "\\n")
for step in itertools.count(1):
    while time.monotonic() < began + step / 100:
        pass
    if os.environ["RANK"] == "0":
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(step=step, elapsed_s=time.monotonic() - began)) + "\\n")
"""


def job(out: Path, number: int) -> HeldJob:
    out.mkdir()
    return HeldJob(TWO, [sys.executable, "-S", "-c", STEPS.format(out=str(out))], out, number)


@needs_root
def test_held_jobs_take_turns(tmp_path: Path) -> None:
    """Two labs of one process are there at once; what one does while it is held is nothing."""
    with job(tmp_path / "a", 1) as one, job(tmp_path / "b", 2) as other:
        await_ready([one, other], 60)
        assert len(own_labs()) == 1, "of this process"
        file = tmp_path / "a/metrics.jsonl"
        done = file.read_text().count("\n") if file.exists() else 0
        assert one.step == done, "as a rule some, before the other was there"
        for goal in (3, 400, 800):
            for running, held in ((one, other), (other, one)):
                before = held.step
                lines = (tmp_path / ("b" if held is other else "a") / "metrics.jsonl").exists()
                assert running.run(60, goal)
                assert running.step >= goal
                ranks = [running, held]
                assert all(stands_still(each._lab.groups.processes(0)) for each in ranks)
                assert held.step == before
                assert lines or not before
        clocks = [moment.now_s for moment in one.moments]
        assert clocks == sorted(clocks), "it never goes back"
    assert own_labs() == []


OUTSIDE = """
import os, sys, time
assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["WORLD_SIZE"] == "2"
if os.environ["RANK"] == "1":
    print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr)
    sys.exit(1)
time.sleep(60)
"""


def test_jobs_outside_of_a_lab_are_held_too(tmp_path: Path) -> None:
    """Without root: ranks stand still, end with the job, and one that lacks memory is known."""
    for name, program in (("a", STEPS.format(out=str(tmp_path / "a"))), ("b", OUTSIDE)):
        (tmp_path / name).mkdir()
        place = Here(2)
        with HeldJob(TWO, [sys.executable, "-S", "-c", program], tmp_path / name, 1, place) as one:
            await_ready([one], 60)
            pids = [rank.process.pid for rank in place.ranks]
            if name == "a":
                assert one.run(60, 50) and one.step >= 50
                assert all(stands_still([pid]) for pid in pids)
                assert one.failed is None and min(place.used_s()) > 0
            else:
                assert one.is_short and one.failed == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


WAITS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("after", "short"), [("oom_kill 3\n", False), ("oom_kill 4\n", True), ("other 1\n", True)]
)
def test_who_is_killed_is_short_of_memory_where_the_kernel_says_so(
    after: str, short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may kill a rank: that taught the tuner that plans need many times their memory."""
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 3\n")
    monkeypatch.setattr("weft.lab.here._COUNTS", counts)
    here = Here(1)
    with here.built():
        here.start([sys.executable, "-S", "-c", WAITS], tmp_path, quiet=True)
        counts.write_text(after)
        here.ranks[0].process.kill()
        here.ranks[0].process.wait(60)
        assert here.look(1.0)
    assert here.ranks[0].killed_for_memory == short
    assert ("out of memory" in here.ranks[0].in_words()) == short


STARTS = """
import subprocess
while True:
    subprocess.run(["true"])
"""


def test_ranks_that_start_processes_are_held_too(tmp_path: Path) -> None:
    """One that is stopped with the process that it forked (vfork) cannot stop before that goes on;
    it was waited for without end, mostly within a hundred times."""
    here = Here(2)
    done: list[bool] = []

    def hold() -> None:
        for _ in range(200):
            here.hold()
            done.append(stands_still(rank.process.pid for rank in here.ranks))
            here.go_on()

    with here.built():
        here.start([sys.executable, "-S", "-c", STARTS], tmp_path, quiet=True)
        holding = Thread(target=hold, daemon=True)
        holding.start()
        holding.join(120)
        held = not holding.is_alive()
    holding.join(120)  # ranks that have ended stand still
    assert held and all(done) and len(done) == 200


KEEPS = """
import subprocess, sys, time
open(sys.argv[1] + "/" + __import__("os").environ["RANK"], "w").write(str(subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(60)"]).pid))
time.sleep(60)
"""


def test_what_a_rank_started_is_not_stopped_with_it(tmp_path: Path) -> None:
    """If all this is killed, ranks end, and nobody would wake the others to see that."""
    here = Here(1)
    with here.built():
        here.start([sys.executable, "-S", "-c", KEEPS, str(tmp_path)], tmp_path, quiet=True)
        child = tmp_path / "0"
        deadline = time.monotonic() + 60
        while not (child.exists() and child.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        here.hold()
        states = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            for pid in (here.ranks[0].process.pid, int(child.read_text()))
        ]
        assert states[0] == "T" and states[1] != "T"
        here.go_on()


class Late(Here):
    """A step that was done before ranks stood still is said only when they go on."""

    def __init__(self, metrics: Path) -> None:
        super().__init__(2)
        self._metrics, self._said = metrics, 0
        self.done_s = (1.0, 1.5, 7.0)
        """By the run's own clock, which does not stand still."""

    def look(self, now_s: float) -> bool:
        return False

    def used_s(self) -> tuple[float, ...]:
        return (1.0, 1.0)

    def hold(self) -> None:
        """Nothing is started."""

    def go_on(self) -> None:
        line = {"step": self._said + 1, "elapsed_s": self.done_s[self._said]}
        self._said += 1
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_a_step_that_is_heard_of_late_was_done_when_it_says(tmp_path: Path) -> None:
    """Its time was taken before five seconds in which nothing went on."""
    one = HeldJob(TWO, [], tmp_path, 1, Late(tmp_path / "metrics.jsonl"))
    one.moments.append(Moment(0, 0.0, (0.0, 0.0)))
    for step, stood_s in ((1, 0.0), (2, 5.0), (3, 0.0)):
        one._held_at = time.monotonic() - stood_s
        assert one.run(30, step)
    seen = [moment.now_s for moment in one.moments]
    assert seen == pytest.approx([0.0, 1.0, 1.5, 2.0], abs=0.2)
