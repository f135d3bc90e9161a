"""This machine, without torch: cores, memory, bf16 instructions, and GPUs by their driver's tool.

What cannot be found out is not guessed: it is left out, and ``Node.problems`` says why.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from weft.cluster.cluster import Chip, Cluster, Node, chip_of_product

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def detect() -> Cluster:
    """The cluster of one: this machine."""
    return Cluster(nodes=(detect_node(),))


def detect_node(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ, *, timeout_s: float = 10
) -> Node:
    """This machine as this process may use it.

    ``root`` holds ``proc`` and ``sys``; ``environment`` gives ``PATH`` and
    ``CUDA_VISIBLE_DEVICES``; a driver's tool that takes longer than ``timeout_s`` is given up.
    """
    problems: list[str] = []
    cpu, flags = _processor(root)
    return Node(
        host=socket.gethostname(),
        cpu=cpu,
        cores=_cores(root),
        memory_gib=_memory_gib(root),
        cpu_bf16=not _BF16_FLAGS.isdisjoint(flags),
        chips=tuple(_cuda_chips(environment, timeout_s, problems)),
        problems=tuple(problems),
    )


def _processor(root: Path) -> tuple[str, set[str]]:
    """Name and instruction flags of the first processor; what the file does not say stays out."""
    fields: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
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
        words = _text(folder / "cpu.max").split()
        words = words or [
            *_text(folder / "cpu.cfs_quota_us").split(),
            *_text(folder / "cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and words[0].isdecimal() and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])


def _memory_gib(root: Path) -> float:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _groups(root, "memory"):
        words = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if words.strip().isdecimal() and int(words) < _UNLIMITED_BYTES:
            total = min(total, int(words))
    return round(total / 2**30, 2)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups around this process, innermost first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        yield from (top / folder for folder in (inner, *inner.parents))


def _text(path: Path) -> str:
    """The file's text; empty where it does not exist or may not be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _cuda_chips(
    environment: Mapping[str, str], timeout_s: float, problems: list[str]
) -> Iterator[Chip]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` shows, in its order, else in that of the bus."""
    rows = _nvidia_smi(environment, timeout_s, problems)
    for index in _visible(rows, environment.get("CUDA_VISIBLE_DEVICES")):
        product, memory_mib, _ = rows[index]
        known = chip_of_product(product)
        blank = Chip(
            name=product, vendor="NVIDIA", memory_gib=0, peak_tflops={}, measured_tflops={}
        )
        if known is None:
            problems.append(f"GPU {index}: {product!r} is not in the catalogue; no peak rates.")
        memory = float(memory_mib) / 1024 if memory_mib.isdecimal() else 0
        chip = known or blank
        yield replace(chip, memory_gib=round(memory or chip.memory_gib, 2))


def _nvidia_smi(
    environment: Mapping[str, str], timeout_s: float, problems: list[str]
) -> list[tuple[str, str, str]]:
    """Product name, memory in MiB and UUID of every NVIDIA GPU of the machine."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=timeout_s, check=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        problems.append(f"nvidia-smi did not answer in {timeout_s:g} s; GPUs are left out.")
        return []
    except (OSError, subprocess.CalledProcessError) as error:
        problems.append(f"nvidia-smi failed ({error}); GPUs are left out.")
        return []
    rows = []
    for line in answer.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            rows.append((parts[0], parts[1], parts[2]))
        elif line.strip():
            problems.append(f"nvidia-smi said {line.strip()!r}, which names no GPU.")
    return rows


def _visible(rows: list[tuple[str, str, str]], selection: str | None) -> list[int]:
    """Row numbers that CUDA would show; like CUDA, it stops at the first name it cannot find."""
    if selection is None:
        return list(range(len(rows)))
    result: list[int] = []
    for word in (part.strip() for part in selection.split(",")):
        matches = [
            index
            for index, (_, _, uuid) in enumerate(rows)
            if word == str(index) or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(matches) != 1:
            break
        result += matches
    return result
