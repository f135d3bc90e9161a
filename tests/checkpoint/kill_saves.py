"""Save, and be killed before the n-th call that touches the disk, for every n.

usage: kill_saves.py SCENARIO FOLDER

Leaves FOLDER/0000, FOLDER/0001, ...: what each kill left; the last one was not killed.
A process of its own, because it forks and because its children die.
"""

import os
import shutil
import signal
import sys
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


def kill_before(number: int) -> None:
    """Let SIGKILL take this process just before its ``number``-th call of ``CALLS``."""
    left = number

    def watch(_frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        if event == "c_call" and isinstance(called, BuiltinFunctionType):
            if called.__name__ in CALLS:
                left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def main(scenario: str, folder: Path) -> None:
    before, (step, seed, keep) = SCENARIOS[scenario]
    start = folder / "start"
    start.mkdir(parents=True)
    for old_step, old_seed in before:
        save(start, old_step, old_seed)
    killed, number = True, 0
    while killed:
        root = folder / f"{number:04d}"
        shutil.copytree(start, root)
        child = os.fork()
        if not child:
            kill_before(number)
            save(root, step, seed, keep)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0, f"{scenario}: failed before kill {number}"
        number += 1
    shutil.rmtree(start)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
