"""Weights that are gathered in eight bits: the numbers of those that are gathered as they are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.cases import NUM_LAYERS, Case
from planner.test_in_flight import H100, resolved
from torch import nn

from benchmarks.every_plan import pool as chips
from weft.cli.plan.text import plan_table
from weft.cluster.view import ClusterView
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.sent import sent_by_plan
from weft.diagnose.verify import (
    Rehearsal,
    difference,
    rehearse,
    rehearsing,
    shrink,
    synthetic_microbatches,
)
from weft.elastic.pool import WorkerPool
from weft.parallel.fp8.gathered import FACTORS, WeightScales, refuse_other_uses
from weft.parallel.fp8.linear import Factors, ScaledLinear
from weft.parallel.fp8.rounding import Scaled, Spans, scaled
from weft.parallel.params import Held, LocalParam
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import Plan, Precision, ZeroLevel
from weft.plan.tiling import Stored
from weft.planner.validate import validate_plan
from weft.precision.roles import Products

CASE = Case("gathered", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_rounded_twice_is_rounded_once(scaling: str, dtype: torch.dtype) -> None:
    """Wherever segments begin; by the scales of the whole weight, though nobody has it."""
    torch.manual_seed(2)
    shape, spans = (
        (300, 200),
        {"tensorwise": Spans(whole=(0, 1)), "blockwise": Spans(blocks=(0, 1))},
    )
    spec = ParamSpec(name="w", shape=shape, unit=0, init=Init("zeros"), decay=True)
    box = Box.whole(shape)
    held = Held(spec, box, (0,), 3, rounding=scaling)
    for largest in (0.9, 225 / 2**10, 224 / 2**10, 449.0, 0.0):  # 225 becomes 224, half of 448
        master = torch.randn(shape, dtype=torch.float64).clamp(-4, 4) / 4 * largest
        master[250, 130] = largest
        weight = master.to(dtype)
        wide = scaled(weight, FACTORS, spans[scaling])
        scales = WeightScales({"w": [held]}, Comm())
        parts = [part for ends in ((0, 77), (77, 41_111), (41_111, 60_000)) for part in
                 box.stretch(*ends)]  # fmt: skip
        scales.find(("w", part, master[part.slices()]) for part in parts)
        once = torch.zeros(shape, dtype=dtype)
        for part in parts:
            values, scale = weight[part.slices()], scales.of("w", part, dtype)
            narrow = (values * scale.to(dtype)).to(FACTORS)
            once[part.slices()] = Scaled(narrow, scale).exact(dtype)
        assert torch.equal(once, wide.exact(dtype))
        twice = scaled(once, FACTORS, spans[scaling])
        assert torch.equal(twice.exact(dtype), once)


def sent(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> float:
    """Bytes of parameters in a step."""
    with rehearsing(address, plan, rehearsal) as (comm, built):
        built.gradients.fence()
        comm.counters.take()
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
        built.gradients.fence()
        return comm.counters["parameters"].bytes


@pytest.mark.parametrize(("level", "precision"), [(1, "fp8"), (3, "fp8"), (3, "fp8-blockwise")])
def test_no_bit_differs_and_bytes_are_halved(
    level: ZeroLevel, precision: Precision, pool: WorkerPool
) -> None:
    """In bf16 with masters; with tensor parallelism, where a weight's scale is of all its parts."""
    case = replace(CASE, zero=level, tp=((2 if precision == "fp8" else 1,),))
    wide = shrink(case.plan(), NUM_LAYERS, precision)
    narrow = wide.each(lambda stage: replace(stage, gather="fp8"))
    optim = case.rehearsal().optim.model_copy(update={"max_grad_norm": None})
    rehearsal = replace(case.rehearsal(), optim=optim, steps=2)
    traces = [rehearse(pool.run, plan, rehearsal) for plan in (wide, narrow)]
    assert traces[0].losses == traces[1].losses and len({*traces[0].losses}) > 1
    found = difference(*traces)
    assert found.param == found.grad == 0
    counted, said = [], []
    view = ClusterView((chips(H100, 80, 4, nodes=1, gbit=100),))
    for plan in (wide, narrow):
        counted.append(sum(pool.run(sent, plan, rehearsal, world_size=plan.world_size)))
        ways = sent_by_plan(plan, rehearsal.spec, view, seq_len=rehearsal.seq_len)
        said.append(sum(size for way, size in ways.items() if way.name == "parameters"))
    saved = [before - after for before, after in (counted, said)]
    assert saved[0] == pytest.approx(saved[1], rel=0.01), "padding is the same"
    assert counted[1] < 0.62 * counted[0], "the matrices of layers half, tables as they are"


TWO = "plan.stages=[{dp: 2, zero: 3}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([TWO, "compute.precision=bf16", "plan.gather=fp8"], "Products of precision fp8 or"),
        ([TWO, "compute.precision=fp8-rowwise", "plan.gather=fp8"], "Products of precision fp8 or"),
        (
            ["plan.stages=[{dp: 2}]", "compute.precision=fp8", "plan.gather=fp8"],
            "plan.gather = 'fp8': expected null. With zero: 1, 2 or 3",
        ),
        (
            [TWO, "compute.precision=fp8", "plan.gather=fp8", "plan.gather_between=nodes"],
            "expected null. No stage's ranks are on several nodes.",
        ),
        ([TWO, "plan.gather_between=nodes"], "expected null without plan.gather"),
        (["plan=auto", "plan.gather=fp8"], "expected null with plan.auto"),
        (["plan.file=a.json", "plan.gather=fp8"], "expected null with plan.file. The file says"),
    ],
)
def test_gathers_without_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        resolved(*overrides, "batch.micro=2")
    assert message in str(refused.value)


def test_the_plan_says_how_weights_come() -> None:
    made = resolved(TWO, "compute.precision=fp8", "plan.gather=fp8", "batch.micro=2")
    (stage,) = made.plan.pipelines[0].stages
    assert stage.gather == "fp8" and type(made.plan).from_json(made.plan.to_json()) == made.plan
    assert any("weights gathered in fp8" in line for line in plan_table(made.plan))
    for change, message in (
        ({"precision": "bf16"}, "'' on this stage"),
        ({"gather": "bf16"}, "'fp8' or ''"),
        ({"zero": 0}, "'' on this stage"),
    ):
        plan = made.plan.each(lambda stage, change=change: replace(stage, **change))
        with pytest.raises(ConfigError, match=message) as refused:
            validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
        assert refused.value.key == "pipelines[0].stages[0].gather"


def test_a_weight_that_something_else_reads_is_refused() -> None:
    """A table of a layer, say, would be read rounded."""
    spec = ParamSpec(name="w", shape=(4, 16), unit=0, init=Init("zeros"), decay=True)
    box = Box.whole(spec.shape)
    pieces = {"w": [Held(spec, box, (0, 1), 3, rounding="tensorwise")]}
    linear, table = nn.Linear(16, 4, bias=False), nn.Embedding(4, 16)
    products = ScaledLinear(linear, Factors(Products(scaling="tensorwise")))
    for module, weight in ((products, linear.weight), (table, table.weight)):
        local = LocalParam(spec, Stored((box,)), weight)
        stages: Any = [SimpleNamespace(module=nn.Sequential(module))]
        if module is products:
            refuse_other_uses(stages, [local], pieces)
            continue
        with pytest.raises(ConfigError, match="Embedding reads w as it is"):
            refuse_other_uses(stages, [local], pieces)
