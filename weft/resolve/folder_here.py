"""What the folder for optimizer state has room for, and how fast it is. Asked before training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.config.errors import ConfigError
from weft.cost.memory import memory_of_plan
from weft.memory.tiers import keeps_apart
from weft.plan.plan import Plan
from weft.precision.roles import Tier
from weft.resolve.resolve import Resolved

KEY = "optim.state_folder"
PROBE_BYTES = 32 << 20


def bytes_apart(resolved: Resolved, plan: Plan, ranks: Sequence[int], tier: Tier) -> float:
    """Of what only updates of these ranks need: what a plan keeps in a tier."""
    kept = [
        rank
        for _, _, stage in plan.stages()
        for rank in {*stage.mesh.ranks}.intersection(ranks)
        if stage.state_tier == tier and keeps_apart(tier, stage.device)
    ]
    if not kept:
        return 0.0
    on_device = plan.each(lambda stage: replace(stage, state_tier="device"))
    seq_len, training = resolved.config.data.seq_len, resolved.training
    memory = memory_of_plan(on_device, resolved.spec, seq_len, training=training)
    return sum(memory[rank].optimizer for rank in {*kept})


def free_bytes(folder: str) -> int:
    """Room in the folder.

    Raises:
        ConfigError: it is not there, or nothing can be written to it.
    """
    hint = "Make it on every machine, or name another."
    if not Path(folder).is_dir():
        raise ConfigError(KEY, folder, "a folder that is there", hint)
    try:
        with tempfile.TemporaryFile(dir=folder):
            found = os.statvfs(folder)
    except OSError as error:
        expected = f"a folder that can be written to ({error.strerror})"
        raise ConfigError(KEY, folder, expected, hint) from error
    return found.f_bavail * found.f_frsize


def speed_note(resolved: Resolved, ranks_here: int | None, step_s: float | None) -> list[str]:
    """In words, how long the folder takes for what an update moves, where it is used.

    ``ranks_here``: the first ranks, which this machine runs; None: all.
    """
    ranks = range(ranks_here or resolved.plan.world_size)
    num_bytes = bytes_apart(resolved, resolved.plan, ranks, "disk")
    folder = resolved.config.optim.state_folder
    speed = _bytes_per_s(folder) if num_bytes and folder else None
    if speed is None:
        return []
    need_s = 2 * num_bytes / speed
    text = f"{KEY} = {folder}: {speed / 1e9:.2g} GB/s, so that the {2 * num_bytes / 1e9:.3g} GB "
    text += f"that each update reads and writes take {need_s:.2g} s"
    if step_s is not None and need_s > step_s:
        text += f", longer than the {step_s:.2g} s predicted of a whole step"
    return [text]


def _bytes_per_s(folder: str) -> float | None:
    """Of writing something through to the disk and reading it again; None: there is no room."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(PROBE_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(len(data)):
                pass
            return 2 * PROBE_BYTES / (time.perf_counter() - began)
    except OSError:
        return None
