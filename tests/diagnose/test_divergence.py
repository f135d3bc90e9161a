"""The finder names what is wrong on one rank, and says nothing of plans that only split unlike."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity.cases import PARITY
from torch import Tensor

from weft.diagnose.divergence import (
    Bisection,
    Divergence,
    RankRecords,
    bisect,
    in_words,
    microbatch_of,
    module_by_module,
    to_json,
)
from weft.diagnose.verify import one_process
from weft.elastic.pool import WorkerPool
from weft.nn.attention import Attention
from weft.nn.feed_forward import GeluMLP, SwiGLU
from weft.plan.plan import Plan, Precision
from weft.train.assemble import Built

CASES = {case.name: case for case in PARITY}
CASES["border-tp1-tp2"] = replace(CASES["border-tp1-tp4"], tp=((1, 2),))
LAYER = 2

EQUAL = (
    "cut",
    "pipelines-3-1-2",
    "gpt2-dropout",
    "recompute",
    "pp2-zb-v-tied",
    "tp4-shared-key-heads",
    "unlike-pipelines-cp",
    "dp3-zero3-idle-rank",
    "unlike-pipelines-zero2",
    "passes-gpt2-tp2",
    "experts-zb-h1-tp2",
)


def search(
    pool: WorkerPool, name: str, meddle: Any = None, *, alone: bool = True, steps: int = 1
) -> Bisection:
    """A case's plan against one process, or against itself."""
    case = CASES[name]
    plan, rehearsal = case.plan(), replace(case.rehearsal(), steps=steps)
    plans = (one_process(plan) if alone else plan, plan)
    return bisect(pool.run, plans, (rehearsal, rehearsal), meddle=(None, meddle))


@pytest.mark.parametrize("name", EQUAL)
def test_plans_that_split_unlike_do_not_diverge(name: str, pool: WorkerPool) -> None:
    found = search(pool, name, steps=2)
    assert found.divergence is None, in_words(found)
    assert found.largest < 0.8, "the band has room"
    assert found.compared > 2 * 4 * 20, "steps, layers, tensors a layer"
    assert in_words(found).startswith("no divergence: ")


def with_precision(plan: Plan, precision: Precision) -> Plan:
    pipelines = [
        replace(p, stages=tuple(replace(s, precision=precision) for s in p.stages))
        for p in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


@pytest.mark.parametrize(("name", "precision"), [("dp2-pp2", "fp32"), ("border-tp1-tp2", "bf16")])
def test_the_band_follows_the_precision(name: str, precision: Precision, pool: WorkerPool) -> None:
    case = CASES[name]
    plan = with_precision(case.plan(), precision)
    rehearsal = replace(case.rehearsal(), steps=2)
    found = bisect(pool.run, (one_process(plan), plan), (rehearsal, rehearsal))
    assert found.divergence is None, in_words(found)
    exact = bisect(pool.run, (with_precision(plan, "fp64"), plan), (rehearsal, rehearsal))
    assert exact.precision == precision
    assert exact.divergence is None, in_words(exact)


def part(built: Built, name: str) -> Any:
    """A module of layer 2, on whatever stage of this rank has it; None where none has."""
    for model in built.stages.values():
        for path, module in model.named_modules():
            logical = ".".join(p for p in path.split(".") if p not in ("block", "product"))
            if logical == f"layers.{LAYER}.{name}".rstrip("."):
                return module
    return None


def wrong_gelu(built: Built, rank: int) -> None:
    """The exact GELU for its tanh form: they differ by 5e-4 at most."""
    if rank != 1:
        return
    ff: GeluMLP = part(built, "ff")

    def forward(x: Tensor) -> Tensor:
        result: Tensor = ff.down(F.gelu(ff.up(x)))
        return result

    ff.forward = forward  # type: ignore[method-assign]


def wrong_silu(built: Built, rank: int) -> None:
    if rank != 3:
        return
    ff: SwiGLU = part(built, "ff")

    def forward(x: Tensor) -> Tensor:
        gate = ff.gate(x)
        result: Tensor = ff.down(gate * torch.sigmoid(1.0001 * gate) * ff.up(x))
        return result

    ff.forward = forward  # type: ignore[method-assign]


def dropped_mask(built: Built, rank: int) -> None:
    """Tokens see other documents of their sample."""
    attn: Attention | None = part(built, "attn") if rank == 1 else None
    if attn is not None:
        attn.register_forward_pre_hook(lambda _, args: (*args[:2], None))


def stale_weight(built: Built, rank: int) -> None:
    """After step 1 one rank does not take over one weight's updates."""
    if rank != 1:
        return
    weight = part(built, "ff.up").weight
    kept: list[Tensor] = []

    def keep(*_: Any) -> None:
        if kept:
            weight.data.copy_(kept[0])
        else:
            kept.append(weight.detach().clone())

    update = built.engine.update

    def update_and_keep(factor: Tensor, weight: Tensor) -> None:
        update(factor, weight)
        keep()

    built.engine.update = update_and_keep  # type: ignore[method-assign]


def swapped_shard(built: Built, rank: int) -> None:
    """One rank holds the halves of its part of a weight in the wrong order."""
    if rank == 1:
        weight = part(built, "attn.v").weight
        weight.data.copy_(weight.data.roll(len(weight) // 2, 0))


def swapped_samples(built: Built, rank: int) -> None:
    """What came over the border is taken for that of other samples."""
    block = part(built, "") if rank == 1 else None
    if block is not None:
        block.register_forward_pre_hook(lambda _, args: (args[0].flip(0), *args[1:]))


def no_gradient(built: Built, rank: int) -> None:
    """A rank leaves its samples out of one gradient."""
    if rank == 0:
        part(built, "ff.gate").weight.register_hook(torch.zeros_like)


def wrong_backward(built: Built, rank: int) -> None:
    if rank == 1:
        down = part(built, "ff.down")
        down.register_forward_pre_hook(lambda _, args: (_Doubled.apply(args[0]),))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@dataclass(frozen=True)
class Fault:
    """A rank made wrong, and what must be named."""

    case: str
    meddle: Callable[[Built, int], None]
    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    pipeline: int | None = None
    microbatch: int | None = None
    op: str = ""
    """Part of what says where to look."""


# Samples 1 and 3 are of one document each, so where rank 1 takes every other sample the mask
# matters from sample 5 on, in microbatch 2.
ACTIVATION = "the activation function in layers.2.ff"
ATTENTION = "attention in layers.2.attn: mask"
STALE = "the update of step 2, and how it reached the rank"
FIRST = "which part of it the rank holds"
BORDER = "a border between stages"
FAULTS = {
    "gelu-dp": Fault(
        "pipelines-2-1-zero2-gpt2", wrong_gelu, 1, "input", "ff.down", (1,), 1, 0, ACTIVATION
    ),
    "silu-tp": Fault("dp2-tp2", wrong_silu, 1, "input", "ff.down", (3,), 0, 0, ACTIVATION),
    "mask-pp": Fault("pp2-1f1b", dropped_mask, 1, "input", "attn.o", (1,), 0, 0, ATTENTION),
    "mask-zero3": Fault("zero3", dropped_mask, 1, "input", "attn.o", (1,), 0, 2, ATTENTION),
    "mask-recompute": Fault(
        "pp2-recompute", dropped_mask, 1, "input", "attn.o", (1,), 0, 0, ATTENTION
    ),
    "stale-dp": Fault("mesh-dp2", stale_weight, 3, "parameter", "ff.up.weight", (1,), op=STALE),
    "stale-pipelines": Fault(
        "pipelines-2-1", stale_weight, 3, "parameter", "ff.up.weight", (1,), op=STALE
    ),
    "stale-tp": Fault("tp2", stale_weight, 3, "parameter", "ff.up.weight", (1,), op=STALE),
    "shard-tp": Fault("tp2", swapped_shard, 1, "parameter", "attn.v.weight", (1,), op=FIRST),
    "samples-border": Fault(
        "pp2-1f1b", swapped_samples, 1, "input", "attn_norm", (1,), 0, 0, BORDER
    ),
    "gradient-dp": Fault(
        "mesh-dp2",
        no_gradient,
        1,
        "parameter gradient",
        "ff.gate.weight",
        (0, 1),
        op="its reduction over ranks",
    ),
    "backward-tp": Fault(
        "tp2", wrong_backward, 1, "gradient", "ff.up", (1,), 0, 0, f"the backward of {ACTIVATION}"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_first_wrong_thing_is_named(fault: Fault, pool: WorkerPool) -> None:
    found = search(pool, fault.case, fault.meddle, steps=fault.step)
    first = found.divergence
    assert first is not None
    assert (first.step, first.kind, first.name, first.side) == (
        fault.step,
        fault.kind,
        f"layers.{LAYER}.{fault.name}",
        "B",
    )
    assert set(first.ranks) <= set(fault.ranks), in_words(found)
    if fault.pipeline is not None:
        assert first.sample is not None
        assert microbatch_of(found.plans[1], first.sample) == (fault.pipeline, fault.microbatch)
    assert f"step {fault.step}" in in_words(found)
    assert f"layers.{LAYER}.{fault.name}" in in_words(found)
    assert fault.op in in_words(found)
    said = to_json(found)["divergence"]
    assert (said["step"], said["layer"]) == (fault.step, LAYER)
    assert fault.op in said["op"] and said["op"]
    if fault.pipeline is not None:
        assert said["microbatch"]["b"] == [fault.pipeline, fault.microbatch]


def test_two_plans_that_are_both_split_are_compared_cell_by_cell(pool: WorkerPool) -> None:
    found = search(pool, "tp2", swapped_shard, alone=False)
    assert found.divergence is not None
    assert found.divergence.ranks == (1,)


def test_what_agreed_right_before_is_named(pool: WorkerPool) -> None:
    words = in_words(search(pool, "pp2-1f1b", dropped_mask))
    assert "Before it, the output of layers.2.attn.v agrees" in words
    assert "mask" in words


def test_compiled_stages_run_module_by_module() -> None:
    plan = CASES["pp2-1f1b"].plan()
    compiled = with_compile(plan)
    assert compiled != plan == module_by_module(compiled)


def with_compile(plan: Plan) -> Plan:
    pipelines = [
        replace(p, stages=tuple(replace(s, compile=True) for s in p.stages)) for p in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


def test_words_of_every_kind_say_where_to_look() -> None:
    plan = CASES["pp2-1f1b"].plan()
    kinds = ("parameter", "input", "output", "gradient", "parameter gradient", None)
    said = set()
    for kind in kinds:
        first = Divergence(
            step=1, kind=kind, name="layers.1.ff.up", side="B", ranks=(), sample=None,
            difference=1.0, band=1e-9, agrees="",
        )  # fmt: skip
        found = Bisection(plans=(plan, plan), steps=1, precision="fp64", compared=1, largest=1e9,
                          divergence=first)  # fmt: skip
        said.add(in_words(found).rpartition("Look at")[2])
    assert len(said) == len(kinds)


@pytest.mark.parametrize("side", [0, 1])
def test_a_loss_that_is_no_number_is_named(side: int) -> None:
    """Every tensor agrees, for there is none; the loss of step 2 is NaN in one plan."""
    case = CASES["pp2-1f1b"]
    losses = [[3.0, 2.0, 1.0] for _ in range(2)]
    losses[side][1] = math.nan
    coming = iter(losses)

    def run(*_: Any, **__: Any) -> list[RankRecords]:
        return [RankRecords([], next(coming))]

    found = bisect(run, (case.plan(),) * 2, (case.rehearsal(),) * 2)
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.kind) == (2, None)
    assert "the loss is not a number" in in_words(found)
    assert to_json(found)["divergence"]["difference"] is None


def nudged(built: Built, rank: int) -> None:
    """One number of one weight of rank 1."""
    if rank == 1:
        part(built, "ff.up").weight.data[0, 0] += 1e-3


def without_a_number(built: Built, rank: int) -> None:
    if rank == 1:
        part(built, "ff.up").weight.data[0, 0] = torch.nan


@pytest.mark.parametrize("meddle", [nudged, without_a_number])
def test_copies_inside_one_plan_that_disagree_are_named(
    meddle: Callable[[Built, int], None], pool: WorkerPool
) -> None:
    """Ranks 0 and 1 of A hold the same weight, and only rank 0's is that of B."""
    case = CASES["mesh-dp2"]
    plan, rehearsal = case.plan(), replace(case.rehearsal(), steps=1)
    found = bisect(pool.run, (plan, one_process(plan)), (rehearsal,) * 2, meddle=(meddle, None))
    first = found.divergence
    assert first is not None, in_words(found)
    assert (first.step, first.kind, first.side, first.ranks) == (1, "parameter", "A", (1,))
    assert first.name == f"layers.{LAYER}.ff.up.weight"
