"""What crosses borders in fewer bytes: what it becomes, and on what that depends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity.cases import Case
from planner.test_in_flight import problem, resolved
from torch import Tensor

from weft.cli.plan.text import plan_table
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.sends import border_bytes
from weft.diagnose.verify import (
    Rehearsal,
    Trace,
    difference,
    in_small,
    one_process,
    rehearse,
    rehearsing,
    run_rank,
    synthetic_microbatches,
)
from weft.elastic.pool import WorkerPool
from weft.nn.stage import Call, Stage
from weft.parallel.casts import Code
from weft.plan.plan import Plan
from weft.planner.search import search
from weft.planner.validate import validate_plan
from weft.train import family

TOLERANCE = 1e-10
E4M3, E5M2 = Code(torch.float8_e4m3fn, has_scales=True), Code(torch.float8_e5m2, has_scales=True)


def through(code: Code, values: Tensor) -> Tensor:
    """What arrives."""
    message = torch.empty(code.size(tuple(values.shape)), dtype=code.dtype)
    code.encode(values, message)
    came = torch.empty_like(values)
    code.decode(message, came)
    return came


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("code", "relative", "of_largest"), [(E4M3, 2**-4, 2**-10 / 224), (E5M2, 2**-3, 2**-17 / 28672)]
)
def test_how_far_rounding_goes(
    code: Code, relative: float, of_largest: float, dtype: torch.dtype
) -> None:
    """Rows of sizes from 2^-20 to 2^8: half a step of the mantissa, or of the smallest number."""
    sizes = torch.arange(-20, 9, dtype=torch.float64).exp2()[:, None]
    torch.manual_seed(1)
    values = (torch.randn(2, 29, 96, dtype=torch.float64) ** 3 * sizes).to(dtype)
    came = through(code, values)
    off = (came.double() - values.double()).abs()
    largest = values.double().abs().amax(-1, keepdim=True)
    least = 2**-25 if dtype == torch.float16 else 0.0
    assert (
        off <= torch.maximum(values.double().abs() * relative, largest * of_largest) + least
    ).all()
    assert off.max() > 0
    assert torch.equal(through(code, values[:, 5:9]), came[:, 5:9]), "of the row alone"


def test_rows_without_a_scale() -> None:
    values = torch.ones(4, 8)
    values[0], values[1, 3], values[2, 5] = 0, torch.inf, torch.nan
    came = through(E4M3, values)
    assert torch.equal(came[0], values[0]) and torch.equal(came[3], values[3])
    assert came[1:3].isnan().all(), "the loss is to say so"


class Rounded(torch.autograd.Function):
    """Rounds what passes, either way, by arithmetic of its own."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return rounded(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return rounded(grad, torch.float8_e5m2)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    peak = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(peak, torch.finfo(dtype).max)
    times = torch.where(peak > 0, (most / peak).log2().floor().exp2(), 1.0)
    return (x * times).to(dtype).double() / times


def run_rounded(address: RankAddress, plan: Plan, rehearsal: Rehearsal, after: int) -> Trace:
    """One process that rounds what a layer gives."""
    with pytest.MonkeyPatch.context() as patch:
        make = family._stage

        def stage(*given: Any) -> Stage:
            made = make(*given)

            def wrapped(call: Call) -> Call:
                return lambda *args: Rounded.apply(call(*args))

            made.units[after].wrap(wrapped)
            return made

        patch.setattr(family, "_stage", stage)
        return run_rank(address, plan, rehearsal)


def cast(case: Case, to: str = "fp8") -> Plan:
    """The case with all its borders cast that lie between meshes."""
    plan = replace(case, border=to).plan()
    validate_plan(plan, num_layers=plan.num_layers, global_batch=6, parts=("a", "f"))
    return plan


SAME_BORDER = [
    Case("pp2", shares=(6,), dp=((1, 1),), layers=((3, 1),)),
    Case("unlike-meshes", shares=(6,), dp=((3, 1),), tp=((1, 2),), layers=((3, 1),), microbatch=4,
         recompute="full", zero=1),
    Case("lists-tp", shares=(6,), microbatch=1, dp=((1, 1),), tp=((2, 1),), layers=((3, 1),),
         lists=(("4F 2(B F) 4B", "2F 4(B F) 2B"),)),
    Case("cp-tp", shares=(6,), dp=((1, 1),), cp=((2, 1),), tp=((1, 2),), layers=((3, 1),)),
    Case("pipelines-zb", shares=(4, 2), dp=((1, 1), (1, 1)), layers=((3, 1), (3, 1)),
         schedule="zb-h1"),
]  # fmt: skip


def test_the_border_is_all_that_numbers_depend_on(pool: WorkerPool) -> None:
    """Not the meshes on either side, micro-batches, order, recomputation nor pipelines; and it is
    what one process gives that rounds there."""
    rehearsal = SAME_BORDER[0].rehearsal()
    alone = one_process(SAME_BORDER[0].plan())
    (reference,) = pool.run(run_rounded, alone, rehearsal, 2, world_size=1)
    exact = rehearse(pool.run, alone, rehearsal)
    assert difference(exact, reference).largest > 1e-5
    assert difference(exact, reference).loss < 0.02
    traces = [rehearse(pool.run, cast(case), rehearsal) for case in SAME_BORDER]
    for case, trace in zip(SAME_BORDER, traces, strict=True):
        found = difference(reference, trace)
        assert found.largest < TOLERANCE, (case.name, found)
    again = rehearse(pool.run, cast(SAME_BORDER[1]), rehearsal)
    assert difference(traces[1], again).largest == 0, "two runs of a plan agree bit for bit"


def test_borders_inside_layers_and_on_a_v(pool: WorkerPool) -> None:
    """Plans with the same borders agree, in bf16 too; those of one mesh are not cast."""
    half = Case("half", shares=(6,), dp=((1, 1),), layers=((2.5, 1.5),))
    wide = replace(half, dp=((2, 1),), tp=((1, 2),), microbatch=3, zero=2)
    v = Case("v", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="zb-v")
    rehearsal = half.rehearsal()
    for one, other, to in (
        (half, wide, "fp8"),
        (half, wide, "bf16"),
        (v, replace(v, schedule="dualpipe-v", microbatch=1, recompute="full"), "fp8"),
    ):
        traces = [rehearse(pool.run, cast(case, to), rehearsal) for case in (one, other)]
        assert difference(*traces).largest < TOLERANCE, (one.name, to)
    assert list(cast(v).casts.values()) == [[(0, 0), (0, 2)]]


def sent(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> float:
    """Bytes over borders in a step."""
    with rehearsing(address, plan, rehearsal) as (comm, built):
        comm.counters.take()
        built.engine.backward(synthetic_microbatches(comm, plan, rehearsal, 0))
        return comm.counters["activations"].bytes


def test_as_many_bytes_are_sent_as_are_said(pool: WorkerPool) -> None:
    case = Case("pp2", shares=(6,), dp=((1, 2),), layers=((3, 1),), microbatch=4)
    plan = case.plan().each(lambda stage: replace(stage, precision="fp32"))
    values = 2 * 6 * 16 * case.rehearsal().spec.d_model
    for to, expected in (("", 4 * values), ("bf16", 2 * values), ("fp8", values + 2 * 6 * 16)):
        first, last = plan.pipelines[0].stages
        stages = (replace(first, border=to), last)
        each = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
        found = pool.run(sent, each, case.rehearsal(), world_size=3)
        assert sum(found) == expected
        said = border_bytes("fp32", 6, 16, case.rehearsal().spec.d_model, cast=to)
        assert 2 * said == expected


TWO = "plan.stages=[{layers: 1}, {}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([TWO, "plan.border=int4"], "plan.border = 'int4': expected 'bf16' or 'fp8', or null."),
        (["plan.stages=[{}]", "plan.border=fp8"], "plan.border = 'fp8': expected null. There is"),
        (
            [TWO, "plan.border=bf16", "compute.precision=bf16"],
            "plan.border = 'bf16': expected null. No border between stages has numbers of more",
        ),
        (
            [TWO, "plan.border=fp8", "plan.border_between=nodes"],
            "plan.border = 'fp8': expected null. No border between nodes has numbers of more",
        ),
        ([TWO, "plan.border_between=nodes"], "expected null without plan.border"),
        ([TWO, "plan.sums=fp8"], "plan.sums = 'fp8': expected null without plan.domains"),
        (["plan.file=a.json", "plan.border=fp8"], "expected null with plan.file. The file says"),
    ],
)
def test_casts_without_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        resolved(*overrides)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, last: (first, replace(last, border="fp8")), "Nothing is sent to the next"),
        (lambda first, last: (replace(first, border="int4"), last), "one of 'bf16', 'fp8', or no"),
        (
            lambda first, last: (replace(first, border="bf16", precision="bf16"), last),
            "expected what has fewer bytes than bf16, or none",
        ),
    ],
)
def test_plans_that_cast_nothing_are_refused(change: Callable[..., Any], message: str) -> None:
    plan = Case("pp2", shares=(6,), dp=((1, 1),), layers=((3, 1),), precision="fp32").plan()
    stages = change(*plan.pipelines[0].stages)
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    with pytest.raises(ConfigError) as refused:
        validate_plan(plan, num_layers=4, global_batch=6)
    assert refused.value.key == f"pipelines[0].stages[{int(not stages[0].border)}].border"
    assert message in str(refused.value)


def test_the_plan_says_it() -> None:
    made = resolved(TWO, "plan.border=fp8")
    plan = made.plan
    assert plan.casts == {"fp8": [(0, 0)]}
    assert type(plan).from_json(plan.to_json()) == plan
    assert "border" not in resolved(TWO).plan.to_json()
    assert "borders cast to fp8: after stage 0, so numbers depend on where" in [*plan_table(plan)]
    with pytest.raises(ConfigError, match="It rounds what one process does not"):
        in_small(plan, made.spec, made.config, 1)


def test_sums_between_domains_say_it() -> None:
    made = resolved("plan.shares=[1,1]", "plan.domains=pipelines", "plan.sums=fp8")
    assert made.plan.sums == "fp8" and type(made.plan).from_json(made.plan.to_json()) == made.plan
    words = "sums between domains cast to fp8, so numbers depend on domains"
    assert words in [*plan_table(made.plan)]
    with pytest.raises(ConfigError, match="sums = 'fp8': expected none without domains"):
        validate_plan(replace(made.plan, domains=()), num_layers=3, global_batch=8)
    with pytest.raises(ConfigError, match=r"plan\.sums"):
        in_small(made.plan, made.spec, made.config, 1)


def test_the_planner_knows_the_smaller_message() -> None:
    slow = problem(gbit=10)
    smaller = replace(slow, options=replace(slow.options, border="fp8", border_between="nodes"))
    usual, found = search(slow).best, search(smaller).best
    assert {stage.border for _, _, stage in found.plan.stages()} == {"fp8", ""}
    assert found.time.step_s == smaller.time(found.plan).step_s < usual.time.step_s
    near = replace(slow, options=replace(smaller.options, border_between="families"))
    assert search(near).best.plan == usual.plan
