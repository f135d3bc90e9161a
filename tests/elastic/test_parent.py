"""Ranks go with the process that started them, and stop when it is asked to."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 300.0
"""For whatever is waited for, on a machine that may be very busy."""

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    def busy(place, folder):
        (folder / f"{place.rank}.pid").write_text(str(os.getpid()))
        deadline = time.monotonic() + 3600
        while time.monotonic() < deadline:
            time.sleep(0.05)

    def job(place, folder):
        return busy(place, folder)

    if __name__ == "__main__":
        folder = Path(sys.argv[2])
        if sys.argv[1] == "ranks":
            from weft.elastic.processes import run_ranks, warm_context
            context = warm_context(preload=())
            run_ranks(busy, (folder,), 2, folder=folder, context=context)
            print("stopped")
        else:
            from weft.elastic.pool import WorkerPool
            with WorkerPool() as pool:
                pool.run(job, folder, world_size=2)
"""


def is_alive(pid: int) -> bool:
    """A process that has ended and waits to be reaped counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@dataclass(frozen=True)
class Started:
    """A parent process, and the process ids of its two ranks."""

    parent: subprocess.Popen[str]
    ranks: list[int]

    def alive(self) -> list[int]:
        return [pid for pid in self.ranks if is_alive(pid)]


@contextmanager
def started(folder: Path, kind: str) -> Iterator[Started]:
    script = folder / "parent_script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen(
        [sys.executable, str(script), kind, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    files = [folder / f"{rank}.pid" for rank in range(2)]
    job = Started(parent, [])
    try:
        assert wait_until(lambda: all(f.exists() and f.read_text() for f in files))
        job.ranks.extend(int(file.read_text()) for file in files)
        yield job
    finally:
        parent.kill()
        for pid in job.alive():
            os.kill(pid, signal.SIGKILL)
        parent.communicate()


@pytest.mark.parametrize("kind", ["ranks", "pool"])
def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path, kind: str) -> None:
    with started(tmp_path, kind) as job:
        assert len(job.alive()) == 2
        job.parent.kill()
        job.parent.wait(TIMEOUT_S)
        assert wait_until(lambda: not job.alive())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_alone_stops_the_ranks(
    tmp_path: Path, number: signal.Signals
) -> None:
    """These ranks listen to nothing, so SIGTERM ends them: that is a stop, not a failure."""
    with started(tmp_path, "ranks") as job:
        os.kill(job.parent.pid, number)
        output, _ = job.parent.communicate(timeout=TIMEOUT_S)
        assert (job.parent.returncode, output) == (0, "stopped\n")
        assert not job.alive()
    assert not list(tmp_path.glob(".*")), "meeting files left behind"
