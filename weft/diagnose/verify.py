"""Rehearsals: the same few steps under a plan and in one process, and how far they differ.

They run at small size in fp64 on data with random loss weights and unequal documents, where every
mistake of a share, a mask or an order shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.config.optim_sections import REHEARSAL_EPS, OptimConfig
from weft.config.sections import Config
from weft.cost.work import share
from weft.data.inside import lengths_of, places_by_work, slots_of
from weft.data.synthetic import SyntheticDataset
from weft.models.registry import param_specs, shape_of
from weft.nn.stage import MicroBatch
from weft.optim.groups import marked
from weft.optim.schedule import lr_at
from weft.plan.borders import INSIDE, place
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.planner.heads import with_head_rows
from weft.planner.whole_blocks import refuse_cut_blocks
from weft.precision.registry import PRECISIONS, reference_of
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut

FLOOR = 1e-3
COARSE_EPS = 1e-3
"""For ``OptimConfig.rehearsed`` in two bytes: a hundred times the rounding noise, as real gradients
are. An optimizer that divides by a gradient's size would make noise to updates of full length."""

ROUNDINGS = 16
"""Of the size of a gradient's tensor, as noise of each element: 6 % in bf16, as was seen."""

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
    by_work: bool = False
    """Ranks that divide samples' tokens get these by the work of their documents."""


@dataclass(frozen=True)
class Trace:
    """What happened: losses and gradient norms by step, final gradients and parameters.

    What a rank, or all of them, do not own is NaN.
    """

    losses: list[float]
    grad_norms: list[float]
    grads: dict[str, Array]
    """Gradient of the last step's mean loss, clipped, by logical name."""
    params: dict[str, Array]
    earlier: list[dict[str, Array]] = field(default_factory=list)
    """Gradients of the steps before the last, where they are kept."""
    added: list[list[float]] = field(default_factory=list)
    """By step, what forwards added to buffers."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between two traces."""

    loss: float
    grad: float
    param: float
    grad_norm: float
    param_beyond: float
    """Of ``param``, what rounding of gradients does not explain; see ``enlarged_rounding``."""

    @property
    def largest(self) -> float:
        """Of what counts."""
        return max(self.loss, self.grad, self.param_beyond, self.grad_norm)


def one_process(plan: Plan) -> Plan:
    """The same job on one rank: whole batches, no splitting, the first stage's settings."""
    _, _, stage = next(plan.stages())
    layers, samples = (0, plan.num_layers), plan.global_batch
    alone = StagePlan(
        mesh=Mesh.of((0,)), layers=layers, device=stage.device, precision=stage.precision
    )
    pipeline = PipelinePlan(stages=(alone,), samples=samples, microbatch=samples)
    return Plan(
        num_layers=plan.num_layers,
        pipelines=(pipeline,),
        history=plan.history,
        margin=plan.margin,
    )


class RunsRanks(Protocol):
    """``WorkerPool.run``."""

    def __call__(self, job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]: ...


def rehearse(run: RunsRanks, plan: Plan, rehearsal: Rehearsal) -> Trace:
    """Run the rehearsal under the plan, in real processes, and put its pieces together."""
    ranks = run(run_rank, plan, rehearsal, world_size=plan.world_size)
    grads = _together(rank.grads for rank in ranks)
    params = _together(rank.params for rank in ranks)
    return Trace(ranks[0].losses, ranks[0].grad_norms, grads, params, added=ranks[0].added)


def _rehearsed_in(asked: str, spec: ModelSpec) -> Precision:
    """The precision of a rehearsal of a model whose configuration asks for one."""
    if asked == "auto":
        return "fp64"
    known = PRECISIONS[asked]
    coarse = known.products is None and known.roundoff > PRECISIONS["fp32"].roundoff
    return "fp64" if coarse and shape_of(spec).experts is not None else reference_of(asked)


def _together(ranks: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """Each tensor with the numbers of every rank that has some."""
    wholes: dict[str, Array] = {}
    for name, own in (item for rank in ranks for item in rank.items()):
        whole = wholes.setdefault(name, own)
        wholes[name] = np.where(np.isnan(own), whole, own)
    return wholes


def in_small(plan: Plan, spec: ModelSpec, config: Config, steps: int) -> tuple[Plan, Rehearsal]:
    """A rehearsal with a small model of the same kind, and the plan for that.

    fp64 unless the configuration names a precision; of one with products in eight bits the
    reference, for what is next to the middle of two numbers of so few bits goes either way by
    roundings of all else; and where a token's experts would, in two bytes.

    Raises:
        ConfigError: sites train for themselves, or what is sent is cast: no one process does so;
            or of the small model nothing is trained, or it has too few blocks.
    """
    for key, cast in (
        ("plan.border", next(iter(plan.casts), "")),
        ("plan.sums", plan.sums),
        ("expert_cast", next(iter(plan.expert_casts), "")),
        ("plan.reduction", max(stage.reduction for _, _, stage in plan.stages())),
    ):
        if cast:
            hint = "It rounds what one process does not. Without it the splitting can be checked."
            raise ConfigError(key, cast, "null", hint)
    if plan.sites:
        hint = "What sites give depends on the plan. Without them its splitting can be checked."
        raise ConfigError("sites", len(plan.sites), "null", hint)
    asked, little = config.compute.precision, spec.reduced()
    plan = with_head_rows(plan, little.vocab_size)
    plan = shrink(plan, little.num_layers, _rehearsed_in(asked, little))
    roundoff = PRECISIONS[plan.rank_plan(0).stage_plan.precision].roundoff
    noise = COARSE_EPS if roundoff > PRECISIONS["fp32"].roundoff else REHEARSAL_EPS
    optim = config.optim.rehearsed(noise)
    parts = max(share(stage.mesh.axes, "seq", "stream") for _, _, stage in plan.stages())
    products = PRECISIONS[plan.rank_plan(0).stage_plan.precision].products
    if products is not None and products.scaling == "blockwise":
        parts = max(parts, products.block * _divides_tokens(plan))
    length = max(16, 2 * parts)
    sized = replace(little, seq_len=length)
    try:
        specs = marked(config.optim, param_specs(sized))
    except ConfigError as error:
        hint = (
            f"The small model that is rehearsed has {little.num_layers} layers: name one of them."
        )
        raise ConfigError(error.key, error.value, f"{error.expected} there too", hint) from error
    try:
        refuse_cut_blocks(plan, sized, specs)
    except ConfigError as error:
        hint = f"The small model that is rehearsed has {error.expected.partition('; not ')[2]}."
        expected = "a precision whose blocks the plan does not cut, as fp8-rowwise"
        raise ConfigError("compute.precision", asked, expected, hint) from error
    return plan, Rehearsal(
        spec=little,
        optim=optim,
        seq_len=length,
        seed=config.seed,
        steps=steps,
        by_work=config.data.balance_documents,
    )


def _divides_tokens(plan: Plan) -> int:
    """Among how many ranks some stage does in all of its layers; 0: none does."""
    most = max(share(stage.mesh.axes, "seq") for _, _, stage in plan.stages())
    return most if most > 1 else 0


def shrink(plan: Plan, num_layers: int, precision: Precision) -> Plan:
    """The same plan for a model of fewer layers, in another precision."""
    grain = INSIDE if plan.cuts else 1
    scale = num_layers / plan.num_layers / grain

    def shrunk(stage: StagePlan) -> StagePlan:
        first, end = (place(grain * round(at * scale)) for at in stage.layers)
        return replace(stage, layers=(first, end), precision=precision)

    return replace(plan.each(shrunk), num_layers=num_layers)


def run_rank(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> Trace:
    """One rank of a rehearsal."""
    trace = Trace([], [], {}, {})
    with rehearsing(address, plan, rehearsal) as (comm, built):
        fill(built.gradients, initial(rehearsal.seed))
        mains = built.gradients.mains
        for step in range(rehearsal.steps):
            built.optimizer.lr = lr_at(rehearsal.optim, step, rehearsal.steps)
            batch = synthetic_microbatches(comm, plan, rehearsal, step)
            result, factor = built.engine.backward(batch)
            grads = [_array(main.grad) * float(factor) for main in mains]
            built.engine.update(factor, result.weight)
            trace.losses.append(float(result.loss))
            trace.grad_norms.append(float(result.grad_norm))
            trace.added.append(result.added.tolist())
        values = [(m, _array(m.value)) for m in (*mains, *built.gradients.frozen)]
        found = ((trace.grads, zip(mains, grads, strict=True)), (trace.params, values))
        for whole, pieces in found:
            for main, piece in ((m, piece) for m, piece in pieces if m.owned):
                whole.setdefault(main.spec.name, np.full(main.spec.shape, np.nan))
                whole[main.spec.name][main.box.slices()] = piece
        built.gradients.fence()
    return trace


@contextmanager
def rehearsing(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal
) -> Iterator[tuple[Comm, Built]]:
    """One rank among the others of a rehearsal; its parameters have no values yet."""
    comm, platform = join_plan(address, plan)
    platform.multiply_fp32(tf32=False)
    try:
        yield (
            comm,
            assemble_model(
                plan,
                rehearsal.spec,
                comm,
                optim=rehearsal.optim,
                seq_len=rehearsal.seq_len,
                overlap=rehearsal.overlap,
            ),
        )
    finally:
        comm.close()


def synthetic_microbatches(
    comm: Comm, plan: Plan, rehearsal: Rehearsal, step: int
) -> list[MicroBatch]:
    """This rank's part of one global batch, with random weights and unequal documents."""
    data = SyntheticDataset(
        vocab_size=rehearsal.spec.vocab_size, seq_len=rehearsal.seq_len, seed=rehearsal.seed
    )
    ranges = plan.rank_plan(comm.rank).microbatches()
    positions = [step * plan.global_batch + i for part in ranges for i in part]
    dropout = (rehearsal.seed, step) if rehearsal.spec.dropout else None
    sizes, batch = [len(part) for part in ranges], data.batch(positions)
    slots = slots_of(plan, rehearsal.seq_len) if rehearsal.by_work else ()
    if slots and positions:
        assert batch.segments is not None
        by_sample = [places_by_work(lengths_of(each).tolist(), slots) for each in batch.segments]
        batch = replace(batch, places=np.stack(by_sample))
    return cut(batch, sizes, comm.device, dropout_seed=dropout)


def _array(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().double().cpu().numpy().copy()


def difference(
    reference: Trace, other: Trace, enlarged: Mapping[str, Array] | None = None
) -> Difference:
    """Largest difference of each kind, relative to the size of what is compared.

    A tensor's scale is its largest element, or ``FLOOR`` of the largest of all tensors: what is
    zero but for rounding does not count. The gradient of a bias is the sum of what its matrix's
    is made of, so its scale is that of the matrix at least: of keys, for the softmax does not see
    what is added to all of them, that sum is zero, and the terms' rounding is what is left. A
    tensor that one side lacks, and an element that nobody owns, count as infinite.

    Args:
        enlarged: By how much parameters may differ besides; see ``enlarged_rounding``.
    """
    params = reference.params, other.params, _floors(reference.params)
    return Difference(
        loss=_relative(np.array(reference.losses), np.array(other.losses)),
        grad=_largest(reference.grads, other.grads, _scales(reference.grads)),
        param=_largest(*params),
        grad_norm=_relative(np.array(reference.grad_norms), np.array(other.grad_norms)),
        param_beyond=_largest(*params, enlarged or {}),
    )


def enlarged_rounding(
    reference: Trace, rehearsal: Rehearsal, precision: Precision
) -> dict[str, Array]:
    """How far each parameter may be off for rounding of its gradients, by an optimizer that divides
    by their size: full length, and the wrong way round, where that is of the size of the noise.

    Every step's gradients of ``reference`` count.
    """
    least, optim = rehearsal.optim.least_divisor, rehearsal.optim
    if least is None:
        return {}
    result = {name: np.zeros_like(whole) for name, whole in reference.params.items()}
    for step, grads in enumerate([*reference.earlier, reference.grads]):
        lr = lr_at(optim, step, rehearsal.steps)
        for name, scale in _scales(grads).items():
            noise = ROUNDINGS * PRECISIONS[precision].roundoff * scale
            result[name] += lr * np.minimum(2.0, noise / (np.abs(grads[name]) + least))
    return result


def _floors(tensors: Mapping[str, Array]) -> dict[str, float]:
    """The least scale of each tensor."""
    floor = FLOOR * max(float(np.abs(whole).max()) for whole in tensors.values())
    return dict.fromkeys(tensors, floor)


def _scales(grads: Mapping[str, Array]) -> dict[str, float]:
    """The scale of each gradient; of a bias, at least that of the matrix beside it."""
    beside = {n: n.removesuffix("bias") + "weight" for n in grads if n.endswith(".bias")}
    own = {name: float(np.abs(whole).max()) for name, whole in grads.items()}
    return {
        name: max(own[name], floor, own.get(beside.get(name, name), 0.0))
        for name, floor in _floors(grads).items()
    }


def _largest(
    reference: Mapping[str, Array],
    other: Mapping[str, Array],
    scales: Mapping[str, float],
    allowed: Mapping[str, Array] = MappingProxyType({}),
) -> float:
    if reference.keys() != other.keys():
        return float("inf")
    return max(
        _relative(whole, other[name], scales[name], allowed.get(name, 0.0))
        for name, whole in reference.items()
    )


def _relative(
    reference: Array, other: Array, floor: float = 0.0, allowed: Array | float = 0.0
) -> float:
    scale = max(float(np.abs(reference).max()), floor) or 1.0
    off = np.maximum(np.abs(reference - other) - allowed, 0.0)
    worst = float(off.max()) / scale
    return float("inf") if np.isnan(worst) else worst
