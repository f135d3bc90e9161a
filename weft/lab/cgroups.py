"""Chips as control groups, version 1 or 2: how much of a core a rank gets, and how much memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.config.errors import RunError
from weft.lab.identity import Identity
from weft.platform.detect import own_groups, text_of

_PERIOD_US = 5000
"""Short, so that a slow chip is slow evenly and does not stop for a tenth of a second at a time."""
_LEAST_QUOTA_US = 1000
"""The kernel takes no less."""
_EMPTY_S = 5.0
"""How long killed processes may take to be gone."""
FIRST = 50
"""Times that a rank counts as much as another process: quotas limit it, not other work here."""


def quota(speed: float) -> tuple[int, int]:
    """Microseconds of processor time, and in how many they may be used."""
    period = max(_PERIOD_US, round(_LEAST_QUOTA_US / speed))
    return round(period * speed), period


class ControlGroups:
    """The control groups of one lab: one a rank, below one of the lab.

    Version 1 has a hierarchy for processors and another for memory; version 2 has one for both.
    """

    def __init__(self, identity: Identity, cpu: Path, memory: Path | None = None) -> None:
        """``cpu``, ``memory``: the groups above the lab's; of version 2 there is one."""
        self._is_old = memory is not None
        self._cpu, self._memory = cpu / identity.name, (memory or cpu) / identity.name
        self._made: list[Path] = []

    @property
    def _folders(self) -> list[Path]:
        """The lab's own group, in every hierarchy that it is in."""
        return [self._cpu, self._memory] if self._is_old else [self._cpu]

    def build(self, num_ranks: int) -> None:
        """Make the lab's own group, which weighs as much as its ranks would without one.

        Raises:
            RunError: the kernel refused.
        """
        for folder in self._folders:
            _make(folder)
            self._made.append(folder)
        weight = FIRST * num_ranks
        if self._is_old:
            _write(self._cpu / "cpu.shares", str(min(1024 * weight, 262144)))
        else:
            _write(self._cpu / "cgroup.subtree_control", "+cpu +memory")
            _write(self._cpu / "cpu.weight", str(min(100 * weight, 10000)))

    def add(self, rank: int) -> None:
        """Make the group of a rank."""
        for folder in self._folders:
            _make(folder / f"rank{rank}")

    def set_speed(self, rank: int, speed: float) -> None:
        """Give a rank this part of a core."""
        micros, period = quota(speed)
        folder = self._cpu / f"rank{rank}"
        if not self._is_old:
            _write(folder / "cpu.max", f"{micros} {period}")
            return
        # A quota that stands is checked against a new period: lift it first.
        _write(folder / "cpu.cfs_quota_us", "-1")
        _write(folder / "cpu.cfs_period_us", str(period))
        _write(folder / "cpu.cfs_quota_us", str(micros))

    def set_memory(self, rank: int, num_bytes: int) -> None:
        """Let a rank hold no more than this, and swap nothing."""
        folder = self._memory / f"rank{rank}"
        limit, swap, most = (
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", num_bytes)  # of both
            if self._is_old
            else ("memory.max", "memory.swap.max", 0)
        )
        _write(folder / limit, str(num_bytes))
        if (folder / swap).exists():
            _write(folder / swap, str(most))

    def killed_for_memory(self, rank: int) -> int:
        """How many processes of a rank the kernel has killed for want of memory."""
        file = "memory.oom_control" if self._is_old else "memory.events"
        words = text_of(self._memory / f"rank{rank}" / file).split()  # among them: oom_kill N
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0

    def entries(self, rank: int) -> list[Path]:
        """A process that writes 0 into these files is of the rank, with all that it starts."""
        return [folder / f"rank{rank}" / "cgroup.procs" for folder in self._folders]

    def processes(self, rank: int) -> set[int]:
        """Every process of a rank."""
        return {pid for entry in self.entries(rank) for pid in _pids(entry)}

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to every process of a rank."""
        send(self.processes(rank), number)

    def remove(self) -> None:
        """Kill what is left in the groups that ``build`` made, and delete them."""
        remove_groups(self._made)


def control_groups(identity: Identity, root: Path = Path("/")) -> ControlGroups:
    """Those of a new lab, below the groups of this process, so that limits on it go on to hold.

    ``root`` holds ``proc`` and ``sys``.

    Raises:
        RunError: this machine does not let a lab have any.
    """
    own = own_groups(root)
    top = root / "sys/fs/cgroup"
    if "cpu" in own and "memory" in own:
        cpu, memory = (_nearest(top / name, own[name]) for name in ("cpu", "memory"))
        return ControlGroups(identity, cpu, memory)
    if "" not in own or not (top / "cgroup.controllers").exists():
        raise RunError("the control groups `cpu` and `memory` are not there; mount /sys/fs/cgroup")
    inner = _nearest(top, own[""])
    for folder in (inner, *inner.parents):
        if {"cpu", "memory"} <= set(text_of(folder / "cgroup.subtree_control").split()):
            return ControlGroups(identity, folder)
        if folder == top:
            break
    try:
        _write(top / "cgroup.subtree_control", "+cpu +memory")
    except RunError as error:
        raise RunError(
            f"no control group above this process hands on `cpu` and `memory`: {error}. "
            "In a container, start it with its own init process and `--cgroupns=host`."
        ) from error
    return ControlGroups(identity, top)


def groups_of_labs(root: Path = Path("/")) -> Iterator[Path]:
    """Folders of every lab on this machine, of those that run and of those that do not."""
    for folder, below, _ in os.walk(root / "sys/fs/cgroup"):
        found = [name for name in below if Identity.of_name(name)]
        yield from (Path(folder) / name for name in found)
        below[:] = [name for name in below if name not in found]


def remove_groups(folders: Sequence[Path]) -> None:
    """Kill every process in these groups and below, and delete them.

    Raises:
        RunError: a process does not end.
    """
    deadline = time.monotonic() + _EMPTY_S
    while pids := {pid for folder in folders for pid in _all_pids(folder)}:
        send(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RunError(f"processes {sorted(pids)} do not end, although they were killed")
        time.sleep(0.01)
    for folder in folders:
        for path, _, _ in os.walk(folder, topdown=False):
            # A process of another container may be in it.
            with _named(f"control group {path} cannot be removed"), suppress(FileNotFoundError):
                Path(path).rmdir()


def send(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _nearest(top: Path, path: str) -> Path:
    """The group, or where a container does not see it, the one at the top."""
    inside = top / path.lstrip("/")
    return inside if inside.is_dir() and ".." not in inside.parts else top


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say what the kernel refused."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {error.strerror}") from error


def _make(folder: Path) -> None:
    with _named(f"control group {folder} cannot be made"):
        folder.mkdir()


def _write(file: Path, text: str) -> None:
    with _named(f"{text!r} cannot be written to {file}"):
        file.write_text(text)


def _pids(file: Path) -> set[int]:
    """Those that this process can name: one outside its container reads as 0."""
    return {int(word) for word in text_of(file).split()} - {0}


def _all_pids(folder: Path) -> set[int]:
    return {pid for path, _, _ in os.walk(folder) for pid in _pids(Path(path) / "cgroup.procs")}
