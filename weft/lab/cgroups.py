"""Chips as control groups, version 1 or 2: how much of a core a rank gets, and how much memory."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.config.errors import RunError
from weft.lab.identity import Identity

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


class ControlGroups(ABC):
    """The control groups of one lab: one a rank, below one of the lab."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def build(self, num_ranks: int) -> None:
        """Make the lab's own group, which weighs as much as its ranks would without one.

        Raises:
            RunError: the kernel refused.
        """
        for folder in self.folders():
            _make(folder)
            self._made.append(folder)
        self.open(FIRST * num_ranks)

    @abstractmethod
    def open(self, weight: int) -> None:
        """Let the groups below the lab's own have limits; it counts as ``weight`` processes."""

    @abstractmethod
    def folders(self) -> Sequence[Path]:
        """The lab's own group, in every hierarchy that it is in."""

    @abstractmethod
    def set_speed(self, rank: int, speed: float) -> None:
        """Give a rank this part of a core."""

    @abstractmethod
    def set_memory(self, rank: int, num_bytes: int) -> None:
        """Let a rank hold no more than this, and swap nothing."""

    @abstractmethod
    def killed_for_memory(self, rank: int) -> int:
        """How many processes of a rank the kernel has killed for want of memory."""

    def add(self, rank: int) -> None:
        """Make the group of a rank."""
        for folder in self.folders():
            _make(folder / f"rank{rank}")

    def entries(self, rank: int) -> list[Path]:
        """A process that writes 0 into these files is of the rank, with all that it starts."""
        return [folder / f"rank{rank}" / "cgroup.procs" for folder in self.folders()]

    def processes(self, rank: int) -> set[int]:
        """Every process of a rank."""
        return {pid for entry in self.entries(rank) for pid in _pids(entry)}

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to every process of a rank."""
        send(self.processes(rank), number)

    def remove(self) -> None:
        """Kill what is left in the groups that ``build`` made, and delete them."""
        remove_groups(self._made)


class VersionOne(ControlGroups):
    """A hierarchy for processors, and another for memory."""

    def __init__(self, cpu: Path, memory: Path, identity: Identity) -> None:
        super().__init__()
        self._cpu, self._memory = cpu / identity.name, memory / identity.name

    def open(self, weight: int) -> None:
        _write(self._cpu / "cpu.shares", str(min(1024 * weight, 262144)))

    def folders(self) -> Sequence[Path]:
        return (self._cpu, self._memory)

    def set_speed(self, rank: int, speed: float) -> None:
        micros, period = quota(speed)
        folder = self._cpu / f"rank{rank}"
        # A quota that stands is checked against a new period: lift it first.
        _write(folder / "cpu.cfs_quota_us", "-1")
        _write(folder / "cpu.cfs_period_us", str(period))
        _write(folder / "cpu.cfs_quota_us", str(micros))

    def set_memory(self, rank: int, num_bytes: int) -> None:
        folder = self._memory / f"rank{rank}"
        _write(folder / "memory.limit_in_bytes", str(num_bytes))
        swap = folder / "memory.memsw.limit_in_bytes"
        if swap.exists():
            _write(swap, str(num_bytes))

    def killed_for_memory(self, rank: int) -> int:
        return _counter(self._memory / f"rank{rank}" / "memory.oom_control")


class VersionTwo(ControlGroups):
    """One hierarchy, whose groups offer what the one above hands on."""

    def __init__(self, above: Path, identity: Identity) -> None:
        super().__init__()
        self._folder = above / identity.name

    def open(self, weight: int) -> None:
        _write(self._folder / "cgroup.subtree_control", "+cpu +memory")
        _write(self._folder / "cpu.weight", str(min(100 * weight, 10000)))

    def folders(self) -> Sequence[Path]:
        return (self._folder,)

    def set_speed(self, rank: int, speed: float) -> None:
        micros, period = quota(speed)
        _write(self._folder / f"rank{rank}" / "cpu.max", f"{micros} {period}")

    def set_memory(self, rank: int, num_bytes: int) -> None:
        folder = self._folder / f"rank{rank}"
        _write(folder / "memory.max", str(num_bytes))
        if (folder / "memory.swap.max").exists():
            _write(folder / "memory.swap.max", "0")

    def killed_for_memory(self, rank: int) -> int:
        return _counter(self._folder / f"rank{rank}" / "memory.events")


def control_groups(identity: Identity, root: Path = Path("/")) -> ControlGroups:
    """Those of a new lab, below the groups of this process, so that limits on it go on to hold.

    ``root`` holds ``proc`` and ``sys``.

    Raises:
        RunError: this machine does not let a lab have any.
    """
    own = _own_groups((root / "proc/self/cgroup").read_text("utf-8"))
    top = root / "sys/fs/cgroup"
    if "cpu" in own and "memory" in own:
        cpu, memory = (_nearest(top / name, own[name]) for name in ("cpu", "memory"))
        return VersionOne(cpu, memory, identity)
    if "" not in own or not (top / "cgroup.controllers").exists():
        raise RunError("the control groups `cpu` and `memory` are not there; mount /sys/fs/cgroup")
    inner = _nearest(top, own[""])
    for folder in (inner, *inner.parents):
        if {"cpu", "memory"} <= set(_words(folder / "cgroup.subtree_control")):
            return VersionTwo(folder, identity)
        if folder == top:
            break
    try:
        _write(top / "cgroup.subtree_control", "+cpu +memory")
    except RunError as error:
        raise RunError(
            f"no control group above this process hands on `cpu` and `memory`: {error}. "
            "In a container, start it with its own init process and `--cgroupns=host`."
        ) from error
    return VersionTwo(top, identity)


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
            _remove(Path(path))


def send(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _own_groups(text: str) -> Mapping[str, str]:
    """Controller -> path of this process's group; version 2 has no controller's name."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _nearest(top: Path, path: str) -> Path:
    """The group, or where a container does not see it, the one at the top."""
    inside = top / path.lstrip("/")
    return inside if inside.is_dir() and ".." not in inside.parts else top


def _make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise RunError(f"control group {folder} cannot be made: {error.strerror}") from error


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:  # a process of another container may be in it
        problem = f"control group {folder} cannot be removed: {error.strerror}"
        raise RunError(problem) from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise RunError(f"{text!r} cannot be written to {file}: {error.strerror}") from error


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _pids(file: Path) -> set[int]:
    """Those that this process can name: one outside its container reads as 0."""
    return {int(word) for word in _words(file)} - {0}


def _all_pids(folder: Path) -> set[int]:
    return {pid for path, _, _ in os.walk(folder) for pid in _pids(Path(path) / "cgroup.procs")}


def _counter(file: Path) -> int:
    """The line ``oom_kill N`` of a file of the kernel's."""
    words = _words(file)
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
