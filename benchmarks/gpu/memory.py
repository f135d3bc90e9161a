"""Memory of plans against the model of it, and checkpoints that move between devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Found, Here, Part
from benchmarks.gpu.speed import OPTIM, model_of, plan_of
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.sections import BatchConfig, Config, DataConfig
from weft.cost.memory import Memory, memory_of_plan
from weft.cost.work import ALL_BY_ADAMW
from weft.data.batch import Batch
from weft.data.synthetic import SyntheticDataset
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.platform.registry import platform_named
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, cut
from weft.train.saving import restore, save

FRAGMENT_STEPS = 200
AS_IT_SAYS = replace(ALL_BY_ADAMW, by_stage=True)
"""Blocks are compiled where a plan says so."""
WITHIN = 0.1
"""Of the memory that was predicted."""


def used(
    address: RankAddress, plan: Plan, spec: ModelSpec, seq_len: int, steps: int
) -> list[float]:
    """GiB: most that was allocated, most that was reserved, reserved in the end, and in use on the
    whole device then."""
    platform = platform_named(plan.devices[0])
    comm = Comm(device=platform.device(address.local_rank))
    built = assemble_model(plan, spec, comm, optim=OPTIM, seq_len=seq_len)
    fill(built.gradients, initial(0))
    data = SyntheticDataset(vocab_size=spec.vocab_size, seq_len=seq_len, seed=1)
    ranges = plan.rank_plan(0).microbatches()
    for step in range(steps):
        batch = data.batch(range(step * plan.global_batch, (step + 1) * plan.global_batch))
        built.engine.step(cut(batch, [len(part) for part in ranges], comm.device))
    platform.synchronize()
    if platform.is_host:
        return [platform.peak_memory_gib()] * 4
    reserved = torch.accelerator.max_memory_reserved(), torch.accelerator.memory_reserved()
    free, whole = torch.accelerator.get_memory_info()
    return [platform.peak_memory_gib(), *(each / 2**30 for each in (*reserved, whole - free))]


def allocated(here: Here, told: Memory) -> float:
    """GiB of what is predicted that an allocator hands out; of a process, what it takes in all."""
    return (told.total - (0 if here.is_host else told.runtime + told.fragments)) / 2**30


def plans(here: Here, spec: ModelSpec) -> Iterator[tuple[str, Plan]]:
    """Twelve; three on the processor."""
    for precision, recompute, (samples, micro) in product(
        dict.fromkeys((here.fast, "fp32")), ("off", "full"), ((1, 1), (2, 1), (2, 2))
    ):
        plan = plan_of(here, spec, samples, micro, precision=precision, recompute=recompute)
        if not here.is_host or recompute == "off":
            yield f"{precision}, recompute {recompute}, {samples} in micro-batches of {micro}", plan


def memory(here: Here, found: Found) -> None:
    """The most that each of twelve plans holds, beside what was predicted; then many steps."""
    spec, seq_len, *_ = model_of(here, "1b")
    spec = replace(spec, num_layers=min(spec.num_layers, 4))
    good, errors = 0, []
    for name, plan in plans(here, spec):
        with here.pool() as pool:  # a process remembers its peak
            peak, _, _, in_use = pool.run(used, plan, spec, seq_len, 3, world_size=1)[0]
        table = memory_of_plan(plan, spec, seq_len, training=AS_IT_SAYS)[0]
        told = allocated(here, table)
        errors.append(told / peak - 1)
        good += abs(errors[-1]) <= WITHIN
        whole = f"with runtime and fragments {table.total / 2**30:.2f} and {in_use:.2f}"
        found.measures(f"{name}, GiB", f"{told:.2f} predicted, {peak:.2f} allocated; {whole}")
    found.measures(f"plans within {WITHIN:.0%}", f"{good} of {len(errors)}")
    _, plan = next(plans(here, spec))
    steps = 20 if here.is_host else FRAGMENT_STEPS
    with here.pool() as pool:
        few = pool.run(used, plan, spec, seq_len, 5, world_size=1)[0]
    with here.pool() as pool:
        many = pool.run(used, plan, spec, seq_len, steps, world_size=1)[0]
    found.measures(f"reserved after 5 and {steps} steps, GiB", f"{few[2]:.3f}, {many[2]:.3f}")
    words = f"{steps} steps take no more than 5: {many[2] / few[2]:.3f} of it"
    found.proves(words, holds=many[2] < 1.05 * few[2] + 0.1)
    worst = max(errors, key=abs)
    if not here.is_host:  # where a process of PyTorch takes more than such a model
        words = f"what is predicted is never more than a tenth too low (worst {worst:+.1%})"
        found.proves(words, holds=min(errors) > -WITHIN)


def keep(
    address: RankAddress, plan: Plan, spec: ModelSpec, seq_len: int, source: str, root: Path
) -> float:
    """Begin with a checkpoint, or with one step of training, and save. Seconds of the save."""
    platform = platform_named(plan.devices[0])
    comm = Comm(device=platform.device(address.local_rank))
    built = assemble_model(plan, spec, comm, optim=OPTIM, seq_len=seq_len)
    data = SyntheticDataset(vocab_size=spec.vocab_size, seq_len=seq_len, seed=1)
    if source:
        restore(built, open_checkpoint(Path(source)))
    else:
        fill(built.gradients, initial(0))
        built.engine.step(
            cut(data.batch(range(plan.global_batch)), [plan.global_batch], comm.device)
        )
    nothing: list[Batch] = []
    config = Config(
        data=DataConfig(path="none", seq_len=seq_len), batch=BatchConfig(samples=1, micro=1)
    )
    run = Run(
        config=config, plan=plan, spec=spec, comm=comm, platform=platform, built=built,
        batches=iter(nothing), first_step=0, last_step=1,
    )  # fmt: skip
    platform.synchronize()
    begun = time.perf_counter()
    save(run, root, 1, fingerprint="none")
    return time.perf_counter() - begun


def checkpoint(here: Here, found: Found) -> None:
    """Processor to card to processor: not a bit changes. Then how fast a large one is."""
    spec, seq_len, *_ = model_of(replace(here, device="cpu"), "1b")
    own = plan_of(here, spec, 1, 1, precision="fp32")
    host = own.each(lambda stage: replace(stage, device="cpu"))
    roots = [here.folder / name for name in ("begin", "there", "back")]
    with here.pool() as pool:
        source = ""
        for plan, root in zip((host, own, host), roots, strict=True):
            pool.run(keep, plan, spec, seq_len, source, root, world_size=1)
            source = str(root)
    first, *others = (open_checkpoint(root) for root in roots)
    for name, other in zip((here.device, "cpu again"), others, strict=True):
        differs = [key for key in _contents(first) if not _equal(first, other, *key)]
        found.proves(f"bit-equal on {name}: {len(_contents(first))} tensors", holds=not differs)
    large, seq_len, *_ = model_of(here, "1b")
    plan = plan_of(here, large, 1, 1)
    with here.pool() as pool:
        seconds = pool.run(keep, plan, large, seq_len, "", here.folder / "large", world_size=1)[0]
        files = [file for file in (here.folder / "large").rglob("*") if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        found.measures("saved, GB", num_bytes / 1e9)
        found.measures("GB/s, the stall of the step too", num_bytes / seconds / 1e9)


def _contents(kept: Checkpoint) -> list[tuple[str, str]]:
    return [(name, kind) for kind in kept.kinds for name in kept.names(kind)]


def _equal(first: Checkpoint, other: Checkpoint, name: str, kind: str) -> bool:
    return torch.equal(_whole(first, name, kind), _whole(other, name, kind))


def _whole(kept: Checkpoint, name: str, kind: str) -> Any:
    from weft.plan.box import Box

    return kept.read(name, kind, Box.whole(kept.shape(name, kind)))


PARTS = (
    Part(name="memory", asks="the most that plans hold, beside what is predicted", run=memory,
         minutes=8),
    Part(name="checkpoint", asks="checkpoints from device to device", run=checkpoint, minutes=6),
)  # fmt: skip
