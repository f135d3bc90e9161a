"""Save, and be killed before the n-th call that touches the disk, for every n that matters.

usage: kill_saves.py FOLDER

Leaves FOLDER/SCENARIO/0000, FOLDER/SCENARIO/0001, ...: what each kill left; the last one was not
killed. Of calls in a row that find the same files, byte for byte, the first alone is a moment to
be killed at.
A process of its own, because it forks and because its children die.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import BuiltinFunctionType, FrameType

from checkpoint_cases import save

CALLS = {"__exit__", "close", "flush", "fsync", "mkdir", "open"}
CALLS |= {"rename", "replace", "rmdir", "unlink", "write"}

SCENARIOS = {
    "first": ([], (1, 11, 2)),
    "next": ([(1, 1), (2, 2)], (3, 13, 2)),
    "same step": ([(1, 1), (2, 2)], (2, 12, 2)),
    "earlier step": ([(1, 1), (2, 2)], (1, 11, 1)),
}
"""Saves (step, seed) that went well before, and the one (step, seed, keep) that is killed."""


def before_each_call(act: Callable[[int], None]) -> None:
    """Have ``act(n)`` done just before this process's ``n``-th call of ``CALLS``."""
    numbers = count()

    def watch(_frame: FrameType, event: str, called: object) -> None:
        is_call = event == "c_call" and isinstance(called, BuiltinFunctionType)
        if is_call and called.__name__ in CALLS:
            sys.setprofile(None)
            act(next(numbers))
            sys.setprofile(watch)

    sys.setprofile(watch)


def files(root: Path) -> dict[str, bytes | None]:
    """Every path below ``root``, with its bytes where it is a file."""
    paths = sorted(root.rglob("*"))
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths}


def moments(root: Path, step: int, seed: int, keep: int) -> list[int]:
    """The calls of a save that find other files than the call before."""
    seen: list[dict[str, bytes | None]] = []
    found: list[int] = []

    def look(number: int) -> None:
        now = files(root)
        if seen[-1:] != [now]:
            seen.append(now)
            found.append(number)

    before_each_call(look)
    save(root, step, seed, keep)
    sys.setprofile(None)
    return found


def kill_at(moment: int) -> None:
    """Let SIGKILL take this process just before its call of this number."""
    before_each_call(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == moment else None)


def main(scenario: str, folder: Path) -> None:
    before, (step, seed, keep) = SCENARIOS[scenario]
    start = folder / "start"
    start.mkdir(parents=True)
    for old_step, old_seed in before:
        save(start, old_step, old_seed)
    for _ in range(2):  # the first also imports what is imported late
        whole = folder / "whole"
        shutil.copytree(start, whole)
        numbers = moments(whole, step, seed, keep)
        shutil.rmtree(whole)
    for place, number in enumerate([*numbers, None]):
        root = folder / f"{place:04d}"
        shutil.copytree(start, root)
        child = os.fork()
        if not child:
            if number is not None:
                kill_at(number)
            save(root, step, seed, keep)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed == (number is not None), f"{scenario}: status {status} at call {number}"
    shutil.rmtree(start)


if __name__ == "__main__":
    for name in SCENARIOS:
        main(name, Path(sys.argv[1], name))
