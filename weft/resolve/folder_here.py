"""What the folder of what is kept on disk has room for, and how fast it is: before training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import NamedTuple

from weft.config.errors import ConfigError
from weft.cost.activations import stage_away
from weft.cost.choice import choice_of
from weft.cost.memory import experts_elsewhere, memory_of_plan
from weft.models.registry import shape_of
from weft.plan.plan import Plan, StagePlan
from weft.recompute.asked import kept_off_disk
from weft.resolve.resolve import Resolved

KEY = "optim.state_folder"
PROBE_BYTES = 32 << 20


class OnDisk(NamedTuple):
    """Bytes that some ranks keep in files."""

    state: float = 0.0
    params: float = 0.0
    activations: float = 0.0
    moved: float = 0.0
    """Read and written in a step: state both ways by its update; parameters to be published, and
    for each forward and backward; activations of each microbatch both ways, and experts once."""
    experts: float = 0.0
    """With their gradients and all that updates need."""

    @property
    def total(self) -> float:
        return self.state + self.params + self.activations + self.experts


def on_disk(resolved: Resolved, plan: Plan, ranks: Sequence[int]) -> OnDisk:
    """What a plan lets these ranks keep there."""
    seq_len, training = resolved.config.data.seq_len, resolved.training
    apart = experts_elsewhere(plan, resolved.spec, seq_len, training, "disk")
    experts = sum(apart.get(rank, 0.0) for rank in ranks)
    found = OnDisk(experts=experts, moved=2 * experts)
    near = plan.each(_without_disk)
    if near == plan:
        return found
    usual, here = (
        memory_of_plan(each, resolved.spec, seq_len, training=training) for each in (near, plan)
    )
    for p, position in (
        (p, each) for p, line in enumerate(plan.pipelines) for each in line.positions()
    ):
        line = plan.pipelines[p]
        stages = [line.stages[number] for number in position]
        away = sum(
            choice.passes * stage_away(shape_of(resolved.spec), choice.work, "disk")
            for choice in (choice_of(line, number, seq_len) for number in position)
        )
        for rank in {*stages[0].mesh.ranks}.intersection(ranks):
            state = usual[rank].optimizer - here[rank].optimizer
            grads = usual[rank].grads - here[rank].grads
            params = usual[rank].weights - here[rank].weights
            kept = usual[rank].activations - here[rank].activations
            many = line.num_microbatches
            moved = 2 * state + params * (1 + 2 * many) + 2 * away * many
            moved += 2 * grads * many  # added to at each, and read by the update
            found = OnDisk(*map(add, found, (state + grads, params, kept, moved, 0.0)))
    return found


def _without_disk(stage: StagePlan) -> StagePlan:
    """The same with that on the device."""
    tiers = {
        name: "device"
        for name, tier in (("state_tier", stage.state_tier), ("param_tier", stage.param_tier))
        if tier == "disk"
    }
    return replace(stage, recompute=kept_off_disk(stage.recompute), **tiers)  # type: ignore[arg-type]


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
    moved = on_disk(resolved, resolved.plan, ranks).moved
    folder = resolved.config.optim.state_folder
    speed = _bytes_per_s(folder) if moved and folder else None
    if speed is None:
        return []
    need_s = moved / speed
    text = f"{KEY} = {folder}: {speed / 1e9:.2g} GB/s, so that the {moved / 1e9:.3g} GB "
    text += f"that each step reads and writes take {need_s:.2g} s"
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
