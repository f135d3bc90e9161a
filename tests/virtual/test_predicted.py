"""The virtual chips run: nothing about how fast."""

import pytest

from benchmarks.virtual import BUCKET_S, NAMES, pipeline_plan, virtual_job
from weft.cost.times import StageTimes
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan, ScheduleName, ZeroLevel
from weft.virtual.rank import run_steps

LAYERS_EACH = 4
SHORT = StageTimes(forward_s=0.001, input_grad_s=0.001, weight_grad_s=0.001)


def two_pipelines(name: ScheduleName, zero: ZeroLevel) -> Plan:
    pipelines = (
        pipeline_plan(name, range(2), 2, LAYERS_EACH, zero=zero),
        pipeline_plan(name, range(2, 4), 1, LAYERS_EACH, zero=zero),
    )
    return Plan(num_layers=2 * LAYERS_EACH, pipelines=pipelines)


@pytest.mark.parametrize(
    ("zero", "gradients", "parameters"),
    [(0, 2, 0), (1, 1, 1)],  # summed up everywhere; each to its owner, and handed out by it
)
def test_links_carry_every_layer_once_a_step(
    zero: ZeroLevel, gradients: int, parameters: int, pool: WorkerPool
) -> None:
    plans = [two_pipelines(name, zero) for name in NAMES]
    expected = {"gradients": gradients, "parameters": parameters}
    jobs = [virtual_job(plan, SHORT) for plan in plans]
    for rank in pool.run(run_steps, jobs, 1, world_size=4):
        for (times,) in rank:
            for name, count in expected.items():
                carried = times.carried_s.get(name, 0)
                assert carried == pytest.approx(LAYERS_EACH * BUCKET_S * count)
            assert 0 < times.passes_s < times.step_s
