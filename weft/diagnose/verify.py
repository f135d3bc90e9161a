"""Prove that a plan changes nothing: the same steps under the plan and in one process, compared.

Runs at small size in fp64 on data with random loss weights and unequal documents, where every
mistake of a share, a mask or an order shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.sections import Config, OptimConfig
from weft.data.synthetic import SyntheticDataset
from weft.nn.stage import MicroBatch
from weft.parallel.mains import MainParam
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-3, "bf16": 0.1}
"""Largest relative difference that rounding explains, by precision: about a million times the
precision's rounding error for fp64, looser below, where Adam's division enlarges noise in
gradients that are nearly zero."""

FLOOR = 1e-3

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A short training run that any plan can do."""

    spec: ModelSpec
    optim: OptimConfig
    seq_len: int
    seed: int
    steps: int = 3
    overlap: bool = True


@dataclass(frozen=True)
class Trace:
    """What happened: losses and gradient norms by step, final gradients and parameters."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    grads: Mapping[str, Array]
    """Gradient of the last step's mean loss, clipped, by logical name."""
    params: Mapping[str, Array]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between two traces."""

    loss: float
    grad: float
    param: float
    grad_norm: float

    @property
    def largest(self) -> float:
        return max(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """A plan compared with one process."""

    difference: Difference
    dtype: Precision
    ranks: int
    steps: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def ok(self) -> bool:
        return self.difference.largest <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        facts = {"dtype": self.dtype, "ranks": self.ranks, "steps": self.steps}
        limits = {"tolerance": self.tolerance, "ok": self.ok}
        return {"max_rel": self.difference.by_name(), **facts, **limits}


@dataclass(frozen=True)
class _Part:
    """One owned piece of a final state."""

    name: str
    shape: tuple[int, ...]
    box: Box
    grad: Array
    param: Array


@dataclass(frozen=True)
class RankTrace:
    """What one rank saw, and the pieces it owns."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    parts: Sequence[_Part]


def one_process(plan: Plan) -> Plan:
    """The same job on one rank: whole batches, no splitting, the first stage's settings."""
    _, _, stage = next(iter(plan.stages()))
    mesh = Mesh.of((0,))
    alone = StagePlan(
        mesh=mesh, layers=(0, plan.num_layers), device=stage.device, precision=stage.precision
    )
    pipeline = PipelinePlan(
        stages=(alone,), samples=plan.global_batch, microbatch=plan.global_batch
    )
    return Plan(num_layers=plan.num_layers, pipelines=(pipeline,))


class RunsRanks(Protocol):
    """``WorkerPool.run``."""

    def __call__(self, job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]: ...


def rehearse(run: RunsRanks, plan: Plan, rehearsal: Rehearsal) -> Trace:
    """Run the rehearsal under the plan, in real processes, and put its pieces together."""
    ranks = run(run_rank, plan, rehearsal, world_size=plan.world_size)
    grads: dict[str, Array] = {}
    params: dict[str, Array] = {}
    for rank in ranks:
        for part in rank.parts:
            for whole, piece in ((grads, part.grad), (params, part.param)):
                whole.setdefault(part.name, np.full(part.shape, np.nan))
                whole[part.name][part.box.slices()] = piece
    return Trace(ranks[0].losses, ranks[0].grad_norms, grads, params)


def verify_plan(
    run: RunsRanks, plan: Plan, spec: ModelSpec, config: Config, *, steps: int
) -> Verdict:
    """Rehearse the plan with a small model of the same kind and compare it with one process.

    fp64 unless the configuration names a precision.
    """
    asked = config.compute.precision
    dtype: Precision = "fp64" if asked == "auto" else asked
    little = spec.reduced()
    plan = shrink(plan, little.num_layers, dtype)
    optim = config.optim.rehearsed()
    rehearsal = Rehearsal(spec=little, optim=optim, seq_len=16, seed=config.seed, steps=steps)
    reference = rehearse(run, one_process(plan), rehearsal)
    found = difference(reference, rehearse(run, plan, rehearsal))
    return Verdict(found, dtype, plan.world_size, steps)


def shrink(plan: Plan, num_layers: int, precision: Precision) -> Plan:
    """The same plan for a model of fewer layers, in another precision."""
    pipelines = []
    for pipeline in plan.pipelines:
        scale = num_layers / plan.num_layers
        stages = tuple(
            replace(
                stage,
                layers=(round(stage.layers[0] * scale), round(stage.layers[1] * scale)),
                precision=precision,
            )
            for stage in pipeline.stages
        )
        pipelines.append(replace(pipeline, stages=stages))
    return Plan(num_layers=num_layers, pipelines=tuple(pipelines))


def run_rank(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> RankTrace:
    """One rank of a rehearsal."""
    comm, _ = join_plan(address, plan, timeout_s=60)
    try:
        return _train(comm, plan, rehearsal)
    finally:
        comm.close()


def _train(comm: Comm, plan: Plan, rehearsal: Rehearsal) -> RankTrace:
    built = assemble_model(
        plan,
        rehearsal.spec,
        comm,
        optim=rehearsal.optim,
        seq_len=rehearsal.seq_len,
        overlap=rehearsal.overlap,
    )
    fill(built.gradients, initial(rehearsal.seed))
    losses, norms, parts = [], [], []
    for step in range(rehearsal.steps):
        result, factor = built.engine.backward(synthetic_microbatches(comm, plan, rehearsal, step))
        grads = {id(m): _array(m.grad) * float(factor) for m in built.gradients.mains}
        built.engine.update(factor)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        parts = [_part(m, grads[id(m)]) for m in built.gradients.mains if m.owned]
    built.gradients.fence()
    return RankTrace(losses, norms, parts)


def synthetic_microbatches(
    comm: Comm, plan: Plan, rehearsal: Rehearsal, step: int
) -> list[MicroBatch]:
    """This rank's part of one global batch, with random weights and unequal documents."""
    data = SyntheticDataset(
        vocab_size=rehearsal.spec.vocab_size, seq_len=rehearsal.seq_len, seed=rehearsal.seed
    )
    ranges = plan.seat(comm.rank).microbatches()
    positions = [step * plan.global_batch + i for part in ranges for i in part]
    dropout = (rehearsal.seed, step) if rehearsal.spec.dropout else None
    sizes = [len(part) for part in ranges]
    return cut(data.batch(positions), sizes, comm.device, dropout_seed=dropout)


def _part(main: MainParam, grad: Array) -> _Part:
    return _Part(main.spec.name, main.spec.shape, main.box, grad, _array(main.value))


def _array(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().double().cpu().numpy().copy()


def difference(reference: Trace, other: Trace) -> Difference:
    """Largest difference of each kind, relative to the size of what is compared.

    A tensor's scale is its largest element, or ``FLOOR`` of the largest of all tensors: what is
    zero but for rounding (the gradient of a key's bias, say) does not count. A tensor that one
    side lacks, and an element that nobody owns, count as infinite.
    """
    return Difference(
        loss=_relative(np.array(reference.losses), np.array(other.losses)),
        grad=_largest(reference.grads, other.grads),
        param=_largest(reference.params, other.params),
        grad_norm=_relative(np.array(reference.grad_norms), np.array(other.grad_norms)),
    )


def _largest(reference: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    if reference.keys() != other.keys():
        return float("inf")
    floor = FLOOR * max(float(np.abs(whole).max()) for whole in reference.values())
    return max(_relative(reference[name], other[name], floor) for name in reference)


def _relative(reference: Array, other: Array, floor: float = 0.0) -> float:
    scale = max(float(np.abs(reference).max()), floor) or 1.0
    worst = float(np.abs(reference - other).max()) / scale
    return float("inf") if np.isnan(worst) else worst
