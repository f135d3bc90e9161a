"""This machine, without torch: cores, memory, bf16 instructions, and the chips of all vendors.

What cannot be found out is not guessed: it is left out, and ``Node.problems`` says why.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from weft.cluster.cluster import Chip, Cluster, Node, Unusable, chip_of_product
from weft.platform.probe import Answer, ask_all
from weft.platform.registry import PLATFORMS
from weft.platform.vendor import TorchBuild, Vendor, installed_torch, vendors

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def detect() -> Cluster:
    """The cluster of one: this machine."""
    return Cluster(nodes=(detect_node(),))


def detect_node(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    *,
    timeout_s: float = 10,
    torch: TorchBuild | None = None,
) -> Node:
    """This machine as this process may use it.

    ``root`` holds ``proc`` and ``sys``; ``environment`` gives ``PATH`` and what drivers read; a
    driver's tool that takes longer than ``timeout_s`` is given up; ``torch``: None is the
    installed one.
    """
    problems: list[str] = []
    chips: list[Chip] = []
    unusable: list[Unusable] = []
    for family in PLATFORMS.imported():
        chips += family.chips(environment, timeout_s=timeout_s, problems=problems)
    named = {each.vendor: each for each in vendors()}
    for answer in ask_all(environment, timeout_s=timeout_s):
        problems += [f"{problem}." for problem in answer.problems]
        vendor = named[answer.vendor]
        found = _shown(vendor, answer, environment, problems)
        against = _against(vendor, answer, found, torch or installed_torch(), problems)
        if against:
            why, way_out = against
            unusable.append(
                Unusable(vendor=vendor.vendor, chips=tuple(found), why=why, way_out=way_out)
            )
        else:
            chips += found
    cpu, flags = _processor(root)
    return Node(
        host=socket.gethostname(),
        cpu=cpu,
        cores=_cores(root),
        memory_gib=_memory_gib(root),
        cpu_bf16=not _BF16_FLAGS.isdisjoint(flags),
        chips=tuple(chips),
        problems=tuple(problems),
        unusable=tuple(unusable),
    )


def _shown(
    vendor: Vendor, answer: Answer, environment: Mapping[str, str], problems: list[str]
) -> list[Chip]:
    """The chips of a vendor that this process may use, in the order in which it sees them."""
    rows = [row for row in answer.rows for _ in range(_devices(vendor, row.name))]
    shown = vendor.shown(rows, environment)
    if rows and not shown and (said := vendor.selection(environment)):
        problems.append(f"{vendor.vendor}: {said} names none of the {len(rows)} that are here.")
    chips = []
    for index in shown:
        name, memory, *_ = rows[index]
        chip = chip_of_product(name)
        if chip is None:
            what = f"{vendor.vendor}: {name!r}, number {index}, is not in the catalogue"
            problems.append(f"{what}; no peak rates.")
            chip = Chip(
                name=name, vendor=vendor.vendor, memory_gib=0, peak_tflops={}, measured_tflops={}
            )
        memory = None if memory is None else memory / _devices(vendor, name)
        chips.append(replace(chip, memory_gib=round(memory or chip.memory_gib, 2)))
    return chips


def _devices(vendor: Vendor, product: str) -> int:
    """That PyTorch sees in what the vendor's tool calls one."""
    chip = chip_of_product(product) if vendor.row_is_package else None
    return 1 if chip is None else chip.devices


def _against(
    vendor: Vendor, answer: Answer, found: list[Chip], torch: TorchBuild, problems: list[str]
) -> tuple[str, str] | None:
    """Why a vendor's chips cannot be used, and what could be done; None where they can."""
    if answer.is_silent:
        return answer.problems[-1].partition(": ")[2], "try again, once the tool answers"
    if not found:
        return None
    if why := vendor.problem_with(torch):
        return why, vendor.install.format(release=torch.version.partition("+")[0])
    if found[0].device not in PLATFORMS:
        why = f"Weft has no devices {found[0].device!r} of its own"
        return why, "install the package that brings them (entry point weft.platforms)"
    if old := vendor.problem_with_driver(torch, answer.rows[0].driver):
        problems.append(f"{vendor.vendor}: {old}.")
    return None


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


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What this process may still take of the machine's memory, or of its control groups'.

    Pages of files that were not touched lately count as free, as they are given back at need.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in text_of(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for folder in _groups(root, "memory"):
        most = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
        used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")
        if most.strip().isdecimal() and used.strip().isdecimal():
            stat = dict(line.split()[:2] for line in text_of(folder / "memory.stat").splitlines())
            free = min(free, int(most) - int(used) + int(stat.get("inactive_file", 0)))
    return free


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
