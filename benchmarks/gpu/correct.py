"""The same numbers: on a card as on the processor, alone, in company, and after a while."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from benchmarks.gpu.part import Found, Here, Part
from weft.cluster.cluster import HOST
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.config.optim_sections import REHEARSAL_EPS, AdamWConfig
from weft.diagnose.reference import by_reference, lacks_reference
from weft.diagnose.verdict import tolerance_of
from weft.diagnose.verify import (
    Rehearsal,
    Trace,
    difference,
    enlarged_rounding,
    one_process,
    rehearse,
    run_rank,
)
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Precision, ScheduleName, StagePlan
from weft.platform.base import Platform
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.schedules.registry import SCHEDULES

LAYERS = 4
SAMPLES = 6
OPTIM = AdamWConfig(lr=0.01, eps=REHEARSAL_EPS, max_grad_norm=0.5)
STEPS_LONG = 200
CONNECTIONS = ("1", "8", "32")
MANY_ON_A_CARD = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Of the environment: NCCL from 2.31 on lets ranks share a card, to try programs by it."""
LEAST_NCCL = (2, 31)
CROWD = 4


def rehearsal(
    family: str, *, steps: int = 3, tied: bool = False, heads: int | None = None
) -> Rehearsal:
    """A small model of a family, with dropout where it knows one; ``heads`` of it, keys' too."""
    row = next(iter(FAMILIES[family].sizes.values()))
    if heads is not None:
        row = replace(row, num_heads=heads, num_kv_heads=heads)
    spec = replace(row.reduced(), num_layers=LAYERS)
    for name, value in {"dropout": 0.3, "tied": tied}.items():
        if name in {field.name for field in fields(spec)}:
            changed = replace(spec, **{name: value})
            with suppress(ConfigError):
                FAMILIES[family].check(changed)
                spec = changed
    return Rehearsal(spec=spec, optim=OPTIM, seq_len=16, seed=5, steps=steps)


def mesh_plan(
    devices: str | tuple[str, ...],
    precision: Precision = "fp64",
    *,
    dp: int = 1,
    tp: int = 1,
    schedule: ScheduleName = "1f1b",
    microbatch: int = 2,
    **stage: Any,
) -> Plan:
    """A pipeline with a stage on each device, or twice that where the schedule turns round."""
    devices = (devices,) if isinstance(devices, str) else devices
    size, meshes = dp * tp, []
    for number, device in enumerate(devices):
        ranks = tuple(range(number * size, (number + 1) * size))
        meshes.append((Mesh.of(ranks, dp=dp, tp=tp), device))
    if schedule in ("zb-v", "dualpipe-v"):
        meshes += meshes[::-1]
    elif schedule == "interleaved":
        meshes *= 2
    each = LAYERS // len(meshes)
    stages = tuple(
        StagePlan(
            mesh=mesh, layers=(n * each, (n + 1) * each), device=device, precision=precision,
            **stage,
        )
        for n, (mesh, device) in enumerate(meshes)
    )  # fmt: skip
    pipeline = PipelinePlan(
        stages=stages, samples=SAMPLES, microbatch=microbatch, schedule=schedule
    )
    return Plan(num_layers=LAYERS, pipelines=(pipeline,))


def side_by_side(devices: tuple[str, ...], shares: tuple[int, ...], zero: int = 0) -> Plan:
    """A whole copy on each device."""
    pipelines = tuple(
        PipelinePlan(
            stages=(
                StagePlan(
                    mesh=Mesh.of((n,)), layers=(0, LAYERS), device=device, precision="fp64",
                    zero=zero,  # type: ignore[arg-type]
                ),
            ),
            samples=share,
            microbatch=2,
        )
        for n, (device, share) in enumerate(zip(devices, shares, strict=True))
    )  # fmt: skip
    return Plan(num_layers=LAYERS, pipelines=pipelines)


def on_host(plan: Plan) -> Plan:
    """The same job on one processor."""
    alone = one_process(plan)
    return alone.each(lambda stage: replace(stage, device=HOST))


Run = Callable[..., list[Any]]


class Table:
    """Plans against one processor, and the worst that was found."""

    def __init__(self, found: Found, pool: WorkerPool, run: Run | None = None) -> None:
        self._found, self._pool, self._run = found, pool, run or pool.run
        self._alone: dict[Rehearsal, Trace] = {}

    def compare(self, name: str, plan: Plan, asked: Rehearsal) -> None:
        """Raises DisprovedError where the plan's numbers are others."""
        precision = plan.rank_plan(0).stage_plan.precision
        if asked not in self._alone:
            self._alone[asked] = rehearse(self._pool.run, on_host(plan), asked)
        alone, enlarged = self._alone[asked], {}
        if PRECISIONS[precision].roundoff > PRECISIONS["fp32"].roundoff:
            enlarged = enlarged_rounding(alone, asked, precision)
        result = difference(alone, rehearse(self._run, plan, asked), enlarged)
        limit = tolerance_of(precision)
        self._found.measures(f"{name}, largest relative difference", result.largest)
        words = f"{name} in {precision} is as one processor within {limit:.0e}"
        self._found.proves(words, holds=result.largest < limit)


def _verify(precision: Precision) -> Callable[[Here, Found], None]:
    def verify(here: Here, found: Found) -> None:
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "recompute": {"recompute": "full"},
            "passes": {"passes": 2},
        }
        if precision == "fp32" and not here.is_host:  # it takes most of a minute on a processor
            variants["compiled"] = {"compile": True}
        with here.pool() as pool:
            table = Table(found, pool)
            for family in FAMILIES:
                asked = rehearsal(family)
                for name, settings in variants.items():
                    plan = mesh_plan(here.device, precision, **settings)
                    table.compare(f"{family}, {name}", plan, asked)
                known = asked
                if "dropout" in {field.name for field in fields(asked.spec)}:
                    known = replace(asked, spec=replace(asked.spec, dropout=0.0))
                if not lacks_reference(known):
                    alone = rehearse(pool.run, mesh_plan(here.device, precision), known)
                    gap = difference(by_reference(known, SAMPLES), alone).largest
                    words = f"{family} is the model written out, with PyTorch's optimizer"
                    found.proves(words, holds=gap < tolerance_of(precision))
        words = "dropout throws the same bits as on the processor (else nothing would agree)"
        found.proves(words)

    return verify


def mixed(here: Here, found: Found) -> None:
    """Cards and processors in one job; cards talk by their own library where there are two."""
    own = here.device
    family = next(iter(FAMILIES))
    with here.pool() as pool:
        table = Table(found, pool)
        table.compare("pipeline card, cpu, cpu", _thirds((own, HOST, HOST)), rehearsal(family))
        tied = rehearsal(family, tied=True)
        table.compare("tied tables apart", mesh_plan((HOST, own)), tied)
        for zero in (0, 1, 2):
            plan = side_by_side((own, HOST, HOST), (4, 1, 1), zero)
            table.compare(f"copies, 4:1:1, ZeRO {zero}", plan, rehearsal(family))
        if here.number > 1:
            plan = side_by_side((own, own, HOST), (3, 2, 1), 1)
            table.compare("two cards and a processor", plan, rehearsal(family))


def _thirds(devices: tuple[str, str, str]) -> Plan:
    bounds = ((0, 2), (2, 3), (3, 4))
    stages = tuple(
        StagePlan(mesh=Mesh.of((n,)), layers=layers, device=device, precision="fp64")
        for n, (layers, device) in enumerate(zip(bounds, devices, strict=True))
    )
    pipeline = PipelinePlan(stages=stages, samples=SAMPLES, microbatch=2)
    return Plan(num_layers=LAYERS, pipelines=(pipeline,))


class Shared(Platform):
    """All ranks on the first card of a family: by its own library, which few allow (``crowd``), or
    by host memory."""

    def __init__(self, card: Platform, *, native: bool) -> None:
        self._card = card
        self.name, self.has_varlen, self.queues = card.name, card.has_varlen, card.queues
        self.is_host, self.has_tf32, self.compiles = card.is_host, card.has_tf32, card.compiles
        self.collective_backend = card.collective_backend if native else "none"
        self.point_to_point = card.point_to_point if native else "none"

    def available(self) -> bool:
        return self._card.available()

    def build(self) -> str:
        return self._card.build()

    def device(self, local_rank: int) -> Any:  # noqa: ARG002
        return self._card.device(0)

    def multiply_fp32(self, *, tf32: bool) -> None:
        self._card.multiply_fp32(tf32=tf32)

    def synchronize(self) -> None:
        self._card.synchronize()

    def peak_memory_gib(self) -> float:
        return self._card.peak_memory_gib()

    def open_group(self, *args: Any) -> Any:
        return self._card.open_group(*args)

    def open_channel(self, *args: Any) -> Any:
        return self._card.open_channel(*args)


def sharing(
    address: RankAddress, family: str, native: bool, job: Callable[..., Any], *args: Any
) -> Any:
    """``job`` in a process whose cards of a family are all the first one."""
    card = PLATFORMS[family]
    if not isinstance(card, Shared):
        PLATFORMS.remove(family)
        PLATFORMS.add(Shared(card, native=native))
    os.environ.update(MANY_ON_A_CARD)
    return job(address, *args)


def shared(here: Here, found: Found) -> None:
    """Two ranks on one card, through host memory: schedules, data parallelism, ZeRO."""

    with here.pool() as alone, here.pool() as pool:

        def run(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
            return pool.run(sharing, here.device, False, job, *args, world_size=world_size)

        table = Table(found, alone, run)
        family = rehearsal(next(iter(FAMILIES)))
        for schedule in SCHEDULES:
            plan = mesh_plan((here.device,) * 2, schedule=schedule)
            table.compare(f"two stages, {schedule}", plan, family)
        for zero in (0, 1, 2, 3):
            plan = mesh_plan(here.device, dp=2, microbatch=3, zero=zero)
            table.compare(f"dp 2, ZeRO {zero}", plan, family)
        table.compare("tp 2", mesh_plan(here.device, tp=2), family)


def sanitized(address: RankAddress, plan: Plan, asked: Rehearsal) -> None:
    """Three steps with every access of the card's streams checked."""
    if plan.devices[address.rank] != HOST:
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    run_rank(address, plan, asked)


def sanitizer(here: Here, found: Found) -> None:
    """Nothing is read or written by two streams that nothing puts in order."""
    asked = rehearsal(next(iter(FAMILIES)))
    plan = mesh_plan((here.device, HOST))
    with here.pool() as pool:
        pool.run(sanitized, plan, asked, world_size=2)
    what = "" if here.is_host else " that PyTorch's sanitizer of streams watched"
    found.proves(f"3 steps{what} end without a complaint")
    tool = shutil.which("compute-sanitizer")
    if here.is_host or tool is None:
        found.measures("compute-sanitizer", "not on this machine")
        return
    code = "from benchmarks.gpu.correct import steps_here; steps_here()"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    given = {**os.environ, "DEVICE": here.device, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    found.proves(f"memcheck of one step: {' '.join(last)}", holds=done.returncode == 0)


def steps_here() -> None:
    """One step in this process, for a tool around it."""
    asked = rehearsal(next(iter(FAMILIES)), steps=1)
    run_rank(
        RankAddress(rank=0, world_size=1, local_rank=0), mesh_plan(os.environ["DEVICE"]), asked
    )


def long_run(here: Here, found: Found) -> None:
    """Losses of many steps stay with the processor's."""
    asked = rehearsal(next(iter(FAMILIES)), steps=20 if here.is_host else STEPS_LONG)
    with here.pool() as pool:
        plan = mesh_plan(here.device, "fp32")
        theirs = rehearse(pool.run, on_host(plan), asked).losses
        ours = rehearse(pool.run, plan, asked).losses
        fast = rehearse(pool.run, mesh_plan(here.device, here.fast), asked).losses
    gap = _gap(ours, theirs)
    found.measures(f"{asked.steps} steps in fp32, largest difference, nats", gap)
    words = f"{here.fast} for fp32, largest difference, nats"
    found.measures(f"{asked.steps} steps in {words}", _gap(fast, theirs))
    words = f"{asked.steps} losses in fp32 are the processor's within 0.001 nats"
    found.proves(words, holds=gap < 0.001)


def _gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def company(here: Here, found: Found) -> None:
    """Every way to divide a model among cards, and pipelines with few hardware queues."""
    _ways(here, found, _as_they_are)
    _queues(here, found, _as_they_are)


def crowd(here: Here, found: Found) -> None:
    """The same ways among ranks that all compute on one card, by its own library of collectives.

    PyTorch comes with an NCCL for now that refuses it; ``LD_PRELOAD`` names a later one.
    """
    if _allows_a_crowd(here, found):
        _ways(replace(here, number=CROWD), found, partial(_on_one_card, here.device))


def crowd_queues(here: Here, found: Found) -> None:
    """Likewise pipelines with few hardware queues."""
    if _allows_a_crowd(here, found):
        _queues(here, found, partial(_on_one_card, here.device))


def _allows_a_crowd(here: Here, found: Found) -> bool:
    version = here.platform.versions().get("nccl", "")
    known = tuple(map(int, version.split(".")[:2])) if version else ()
    if here.is_host or known >= LEAST_NCCL:
        return True
    needed = ".".join(map(str, LEAST_NCCL))
    found.measures("left out", f"NCCL {version or 'of unknown version'}, {needed} is needed")
    return False


def _as_they_are(pool: WorkerPool) -> Run:
    return pool.run


def _on_one_card(device: str, pool: WorkerPool) -> Run:
    def run(*job: Any, world_size: int) -> list[Any]:
        return pool.run(sharing, device, True, *job, world_size=world_size)

    return run


def _ways(here: Here, found: Found, on: Callable[[WorkerPool], Run]) -> None:
    """``on``: how a pool runs ranks that share a job."""
    with here.pool() as alone, here.pool() as pool:
        table = Table(found, alone, on(pool))
        family = rehearsal(next(iter(FAMILIES)), heads=8)
        for name, plan in _divided(here):
            table.compare(name, plan, family)
        table.compare("uneven last micro-batch", mesh_plan(here.device, dp=2, microbatch=4), family)


def _queues(here: Here, found: Found, on: Callable[[WorkerPool], Run]) -> None:
    queues = here.platform.queues
    for connections in CONNECTIONS if queues else ("no",):
        with here.pool() as alone, here.pool() as pool:  # a process reads the variable once
            run = on(pool)
            if queues is not None:
                run = partial(_run_with, run, queues.variable, connections)
            table = Table(found, alone, run)
            family = rehearsal(next(iter(FAMILIES)), heads=8)
            for schedule in SCHEDULES:
                plan = mesh_plan((here.device,) * 2, schedule=schedule)
                table.compare(f"two stages, {schedule}, {connections} queues", plan, family)


def _run_with(run: Run, name: str, value: str, *job: Any, world_size: int) -> list[Any]:
    return run(_in_environment, name, value, *job, world_size=world_size)


def _in_environment(
    address: RankAddress, name: str, value: str, job: Callable[..., Any], *args: Any
) -> Any:
    """``job`` with a variable that is read when the device is first used."""
    os.environ[name] = value
    return job(address, *args)


def _divided(here: Here) -> Iterator[tuple[str, Plan]]:
    device, number = here.device, here.number
    for zero in (0, 1, 2, 3):
        yield f"dp 2, ZeRO {zero}", mesh_plan(device, dp=2, zero=zero)
    for tp in (2, 4, 8):
        if tp <= min(number, 2 if here.is_host else 8):
            yield f"tp {tp}", mesh_plan(device, tp=tp)
    yield "tp 2 in 3 pieces", mesh_plan(device, tp=2, pieces=3)
    if number >= 4 and not here.is_host:
        yield "dp 2 x tp 2", mesh_plan(device, dp=2, tp=2)
        yield "pp 2 x dp 2, ZeRO 3", mesh_plan((device,) * 2, dp=2, zero=3)


PARTS = (
    Part(
        name="verify-fp64", asks="the same numbers as the processor, in fp64",
        run=_verify("fp64"), minutes=5,
    ),
    Part(
        name="verify-fp32", asks="the same in fp32, compiled too", run=_verify("fp32"), minutes=8,
    ),
    Part(name="mixed", asks="cards and processors in one job", run=mixed, minutes=5),
    Part(name="shared", asks="two ranks on one card by host memory", run=shared, minutes=8),
    Part(name="sanitizer", asks="streams under their checkers", run=sanitizer, minutes=6),
    Part(name="long-run", asks="losses of many steps beside cpu", run=long_run, minutes=6),
    Part(
        name="company", asks="every way to divide a model among cards", run=company, minutes=8,
        devices=2,
    ),
    Part(
        name="crowd", asks="the same among ranks that share a card, by its own library", run=crowd,
        minutes=8,
    ),
    Part(
        name="crowd-queues", asks="pipelines of such ranks with few hardware queues",
        run=crowd_queues, minutes=8,
    ),
)  # fmt: skip
