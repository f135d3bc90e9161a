"""Gradients that ranks of a domain sum in fewer bits: what a plan says of it, refuses and sends."""

from dataclasses import replace

import pytest
from parity.cases import NUM_LAYERS, Case
from planner.test_in_flight import H100, resolved

from benchmarks.every_plan import pool as chips
from weft.cli.plan.text import plan_table
from weft.cluster.view import ClusterView
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.sent import sent_by_plan
from weft.diagnose.verify import Rehearsal, in_small, rehearsing, shrink, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan, ZeroLevel
from weft.planner.problem import Problem, Workload
from weft.planner.validate import validate_plan

CASE = Case("summed", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3)


def sent(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> float:
    """Bytes of gradients in a step."""
    with rehearsing(address, plan, rehearsal) as (comm, built):
        built.gradients.fence()
        comm.counters.take()
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
        return comm.counters["gradients"].bytes


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bytes_are_a_quarter_of_those_of_fp32(level: ZeroLevel, pool: WorkerPool) -> None:
    """By count and as predicted; and less time is predicted where the links are slow."""
    case = replace(CASE, zero=level)
    wide = shrink(case.plan(), NUM_LAYERS, "bf16")
    narrow = wide.each(lambda stage: replace(stage, reduction="fp8"))
    rehearsal = case.rehearsal()
    view = ClusterView((chips(H100, 80, 4, nodes=1, gbit=100),))
    counted, said, seconds = [], [], []
    for plan in (wide, narrow):
        counted.append(sum(pool.run(sent, plan, rehearsal, world_size=plan.world_size)))
        ways = sent_by_plan(plan, rehearsal.spec, view, seq_len=rehearsal.seq_len)
        said.append(sum(size for way, size in ways.items() if way.name == "gradients"))
        work = Workload(spec=rehearsal.spec, seq_len=rehearsal.seq_len, samples=6)
        seconds.append(Problem(work, view).time(plan).step_s)
    assert counted[1] / counted[0] == pytest.approx(129 / 128 / 4, rel=0.1), (
        "rows end with segments"
    )
    assert said[1] / said[0] == pytest.approx(129 / 128 / 4)
    assert counted[1] == pytest.approx(said[1], rel=0.2), "segments have room behind the last piece"
    assert seconds[1] < seconds[0]


TWO = "plan.stages=[{dp: 2}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.stages=[{}, {}]", "plan.reduction=fp8"], "expected null. No ranks hold the same."),
        (
            [TWO, "plan.reduction=fp8", "plan.reduction_between=nodes"],
            "expected null. No ranks that sum are on several nodes.",
        ),
        ([TWO, "plan.reduction_between=nodes"], "expected null without plan.reduction"),
        (["plan=auto", "plan.reduction=fp8"], "expected null with plan.auto"),
        (["plan.file=a.json", "plan.reduction=fp8"], "expected null with plan.file. The file says"),
    ],
)
def test_casts_without_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        resolved(*overrides, "batch.micro=2")
    assert message in str(refused.value)


def test_the_plan_says_so_and_is_not_compared_with_one_process() -> None:
    made = resolved(TWO, "plan.reduction=fp8", "batch.micro=2")
    (stage,) = made.plan.pipelines[0].stages
    assert stage.reduction == "fp8" and type(made.plan).from_json(made.plan.to_json()) == made.plan
    assert any("gradients summed in fp8" in line for line in plan_table(made.plan))
    with pytest.raises(ConfigError, match="It rounds what one process does not"):
        in_small(made.plan, made.spec, made.config, 1)
    for change, message in (({"reduction": "fp4"}, "one of 'bf16', 'fp8', or none"),):
        plan = made.plan.each(lambda stage, change=change: replace(stage, **change))
        with pytest.raises(ConfigError, match=message) as refused:
            validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
        assert refused.value.key == "pipelines[0].stages[0].reduction"
