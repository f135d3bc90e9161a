"""Plans that others tried on one cluster, mixed or not: ``hetero.json``.

A trial is predicted as any run is. Besides, it becomes a plan of ours on a view of its cluster, so
that plans that were tried and plans that the planner finds are compared by one model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.prediction_model import Constants, hardware_on, memory_of
from benchmarks.published import Record, Run, attempt, shape_of, with_numbers
from benchmarks.published_chips import (
    Shelf,
    UnknownRecordError,
    cluster_from,
    read_records,
    shelf_of,
)
from benchmarks.software import generation_of
from weft.cluster.cluster import Chip, Dtype
from weft.cluster.view import ClusterView
from weft.cost.operators import Op, Phase, softmax_op
from weft.cost.rates import CostFunction
from weft.models.gpt2.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Problem, Workload
from weft.planner.search import NoPlan, search
from weft.simulate.step import Knowledge, time_of_plan

USABLE = 0.94
"""Part of a chip's memory that its driver leaves: 15 of a T4's 16 GiB."""
PADDING = 2
"""Entries before the first decoder layer in AMP's lists of layers; four follow the last."""
SOFTWARE = {"FlagScale": "Megatron-Core", "": "DeepSpeed pipeline"}
"""By a word of its source, what a trial ran on."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan that was tried."""

    run: Run
    cluster: ClusterView
    failed: bool
    """It ran out of memory, or of time."""

    @property
    def spec(self) -> ModelSpec:
        """The model, as the planner knows models."""
        shape = self.run.job.shape
        return replace(
            SIZES["medium"],
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            d_head=shape.d_head,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            vocab_size=shape.vocab_size,
            seq_len=self.run.job.seq_len,
        )

    @property
    def plan(self) -> Plan:
        """The trial as a plan: positions one after another over the cluster's ranks."""
        job = self.run.job
        each = job.dp * job.tp
        stages = [
            StagePlan(
                mesh=Mesh.of(range(p * each, (p + 1) * each), dp=job.dp, tp=job.tp),
                layers=work.layers,
                precision="fp16",
                device="cuda",
            )
            for p, work in enumerate(job.works())
        ]
        pipeline = PipelinePlan(
            stages=tuple(stages), samples=job.global_batch, microbatch=job.microbatch * job.dp
        )
        return Plan(num_layers=job.shape.num_layers, pipelines=(pipeline,))


def read_trials(folder: Path) -> Iterator[Trial | tuple[str, str]]:
    """Every trial, failed ones included: as a trial, or its name and what it lacks."""
    shelf = shelf_of(folder)
    for record in read_records(folder / "hetero.json"):
        kind, name = str(record.get("kind")), str(record.get("id", "?"))
        if kind != "real_trial":
            yield name, f"{kind!r} is no plan that was run"
            continue
        run = attempt(record, partial(_trial, shelf=shelf))
        if isinstance(run, Run):
            cluster = cluster_from(str(record.get("cluster")), shelf)
            yield Trial(run=run, cluster=cluster, failed=run.measured == inf)
        else:
            yield run


def _trial(record: Record, shelf: Shelf) -> Run:
    """A plan that was tried; positions fill the cluster's machines in the order printed."""
    plan = _plan(record.get("parallel"))
    cluster = cluster_from(str(record.get("cluster")), shelf)
    sizes = _sizes(str(record.get("model")))
    tp, pp, mbs = (plan.get(key, 1) for key in ("tp", "pp", "mbs"))
    dp = plan.get("dp") or max(cluster.world_size // (tp * pp), 1)
    if tp * pp * dp > cluster.world_size:
        raise UnknownRecordError(f"tp x pp x dp is {tp * pp * dp}, on {cluster.world_size} chips")
    made = next(made for word, made in SOFTWARE.items() if word in str(record.get("source")))
    generation = generation_of(made)
    shape = replace(shape_of(sizes), dropout=generation.dropout)
    job = Job(
        shape=shape,
        seq_len=sizes["seq_len"],
        global_batch=plan.get("gbs") or mbs * dp,
        microbatch=mbs,
        dp=dp,
        tp=tp,
        pp=pp,
        splits=_splits(plan.get("layer_partition") or (), shape.num_layers, pp),
        sequence_parallel=generation.sequence_parallel,
        dtype="fp16",
        fused_attention=generation.fused_attention,
    )
    stages = [range(p * tp * dp, (p + 1) * tp * dp) for p in range(pp)]
    return Run(
        name=str(record.get("id", "?")),
        group=str(record.get("id", "?")).rsplit("_", 1)[0],
        job=job,
        chips=tuple(_slowest(ranks, cluster) for ranks in stages),
        generation=generation,
        num_chips=cluster.world_size,
        chips_per_node=min(pool.chips_per_node for pool in cluster.pools),
        network_gbit_s=None,
        measured=_seconds(record, job),
    )


def _plan(said: Any) -> dict[str, Any]:
    """Degrees by name, from a mapping or from words such as "TP8 PP4 mbs1 gbs1024"."""
    if isinstance(said, Mapping):
        return {key: value for key, value in with_numbers(said).items() if value is not None}
    found = re.findall(r"\b(tp|pp|dp|mbs|gbs)\s*=?\s*(\d+)", str(said).lower())
    if not found:
        raise UnknownRecordError("no plan")
    return {key: int(number) for key, number in found}


def _sizes(model: str) -> dict[str, Any]:
    """What a model's name says: "24L h1024 seq1024 V52256", or at least how large it is."""
    marks = {
        "n_layers": r"(\d+)\s*(?:L\b|layers)",
        "hidden": r"\bh\s*(\d+)",
        "seq_len": r"\bseq\s*(\d+)",
        "vocab": r"\bV\s*(\d+)",
    }
    found = {key: re.search(mark, model) for key, mark in marks.items()}
    sizes: dict[str, Any] = {key: int(one[1]) for key, one in found.items() if one}
    if "seq_len" not in sizes:
        raise UnknownRecordError("no sizes of the model")
    return {**sizes, "model": model}


def _splits(cuts: Sequence[int], num_layers: int, pp: int) -> tuple[int, ...]:
    """First layers of the positions after the first; lists may count entries besides layers."""
    if len(cuts) != pp + 1:
        return ()
    before = PADDING if cuts[-1] > num_layers else 0
    return tuple(min(max(int(cut) - before, 0), num_layers) for cut in cuts[1:-1])


def _slowest(ranks: Sequence[int], cluster: ClusterView) -> Chip:
    """The slowest of a position's chips, on the slowest of its networks."""
    pools = [cluster.pool_of(rank) for rank in ranks]
    chip = min((pool.chip for pool in pools), key=lambda chip: chip.peak_flops("fp16") or 0.0)
    network = min(pool.network_bytes_s for pool in pools)
    return replace(chip, network_gbit_s=network * 8 / 1e9)


def _seconds(record: Record, job: Job) -> float:
    """Of a step; infinite where the trial failed."""
    unit, value = str(record.get("unit") or "s").lower(), float(record.get("value") or inf)
    if not value > 0:
        raise UnknownRecordError(f"value = {record.get('value')!r} is no measure of speed")
    if value == inf:
        return inf
    if "sample" in unit:
        return job.global_batch / value
    return job.global_batch * job.seq_len / value if "token" in unit else value


def by_cluster(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials of one job on one cluster, by the name of their group."""
    found: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        job = trial.run.job
        pools = [(pool.chip.name, pool.num_chips) for pool in trial.cluster.pools]
        key = (trial.run.group, tuple(pools), job.shape, job.seq_len, job.global_batch)
        found.setdefault(key, []).append(trial)
    names: dict[str, list[Trial]] = {}
    for (group, *_), members in found.items():
        alike = sum(name.split("#")[0] == group for name in names)
        names[f"{group}#{alike + 1}" if alike else str(group)] = members
    return names


@dataclass(frozen=True, slots=True)
class ScoresInMemory:
    """A chip on which software writes attention's scores to memory: plans of ours never do."""

    chip: CostFunction
    dropout: bool

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        """Attention as two products over all pairs of positions, and a softmax between them."""
        if op.kind != "attention":
            return self.chip.seconds(op, phase, dtype)
        seen, width = 2 * op.n, op.k / 2
        parts = (
            Op("scores", "batched", op.m, seen, width, op.repeat),
            Op("values", "batched", op.m, width, seen, op.repeat),
            softmax_op(op.m * seen * op.repeat, dropout=self.dropout),
        )
        return sum(self.chip.seconds(part, phase, dtype) for part in parts)

    def moving_seconds(self, num_bytes: float) -> float:
        """As the chip does."""
        return self.chip.moving_seconds(num_bytes)


def _knowledge(trial: Trial, constants: Constants) -> Knowledge:
    """What the runs are predicted with, for plans on the same chips and links."""
    by_name = {}
    for pool in sorted(trial.cluster.pools, key=lambda pool: -pool.network_bytes_s):
        chip = replace(pool.chip, network_gbit_s=pool.network_bytes_s * 8 / 1e9)
        hardware = hardware_on(trial.run, chip, constants)
        if not trial.run.job.fused_attention:
            slow = ScoresInMemory(hardware.chip, trial.run.job.shape.dropout)
            hardware = replace(hardware, chip=slow)
        by_name[pool.chip.name] = hardware
    return Knowledge(hardware=by_name)


def planned_seconds(trial: Trial, constants: Constants) -> float:
    """A step of the trial's plan, as the planner sees it."""
    known = _knowledge(trial, constants)
    seq_len = trial.run.job.seq_len
    return time_of_plan(
        trial.plan, trial.spec, trial.cluster, seq_len=seq_len, knowledge=known
    ).step_s


def chosen_seconds(trial: Trial, constants: Constants) -> float | None:
    """A step of the plan that the planner chooses for the trial's job and cluster; None where it
    finds none that fits."""
    job = trial.run.job
    workload = Workload(spec=trial.spec, seq_len=job.seq_len, samples=job.global_batch)
    try:
        found = search(Problem(workload, trial.cluster, _knowledge(trial, constants)))
    except NoPlan:
        return None
    return found.best.time.step_s


def fits(trial: Trial, constants: Constants) -> bool:
    """The trial's ranks are predicted to have room enough."""
    room = min(chip.memory_gib for chip in trial.run.chips) * USABLE * 2**30
    return memory_of(trial.run, constants) <= room
