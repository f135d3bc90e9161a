"""This machine, without torch: cores, memory, bf16 instructions, and what device families find.

What cannot be found out is not guessed: it is left out, and ``Node.problems`` says why.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.cluster.cluster import Cluster, Node
from weft.platform.registry import PLATFORMS

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def detect() -> Cluster:
    """The cluster of one: this machine."""
    return Cluster(nodes=(detect_node(),))


def detect_node(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ, *, timeout_s: float = 10
) -> Node:
    """This machine as this process may use it.

    ``root`` holds ``proc`` and ``sys``; ``environment`` gives ``PATH`` and what drivers read; a
    driver's tool that takes longer than ``timeout_s`` is given up.
    """
    problems: list[str] = []
    cpu, flags = _processor(root)
    return Node(
        host=socket.gethostname(),
        cpu=cpu,
        cores=_cores(root),
        memory_gib=_memory_gib(root),
        cpu_bf16=not _BF16_FLAGS.isdisjoint(flags),
        chips=tuple(
            chip
            for family in PLATFORMS.imported()
            for chip in family.chips(environment, timeout_s=timeout_s, problems=problems)
        ),
        problems=tuple(problems),
    )


def _processor(root: Path) -> tuple[str, set[str]]:
    """Name and instruction flags of the first processor; what the file does not say stays out."""
    fields: dict[str, str] = {}
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", ""))  # x86, Arm
    return fields.get("model name") or platform.machine() or "unknown", set(flags.split())


def _cores(root: Path) -> int:
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each enclosing control group grants, version 2 and 1."""
    for folder in _groups(root, "cpu"):
        words = text_of(folder / "cpu.max").split()
        words = words or [
            *text_of(folder / "cpu.cfs_quota_us").split(),
            *text_of(folder / "cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and words[0].isdecimal() and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])


def _memory_gib(root: Path) -> float:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _groups(root, "memory"):
        words = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
        if words.strip().isdecimal() and int(words) < _UNLIMITED_BYTES:
            total = min(total, int(words))
    return round(total / 2**30, 2)


def own_groups(root: Path = Path("/")) -> dict[str, str]:
    """Controller -> path of this process's control group; that of version 2 has no name."""
    lines = (line.split(":", 2) for line in text_of(root / "proc/self/cgroup").splitlines())
    return {name: path for _, names, path in lines for name in names.split(",")}


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups around this process, innermost first."""
    own = own_groups(root)
    for name in own.keys() & {controller, ""}:
        inner = Path(own[name].lstrip("/"))
        yield from (root / "sys/fs/cgroup" / name / folder for folder in (inner, *inner.parents))


def text_of(path: Path) -> str:
    """A file of the kernel's; empty where it does not exist or may not be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
