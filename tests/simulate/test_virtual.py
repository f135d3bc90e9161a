"""The virtual chips run: nothing about how fast."""

import pytest

from benchmarks.virtual import BUCKET_BYTES, BUCKET_S, pipeline_plan, run_steps
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan, ScheduleName

LAYERS_EACH = 4


def two_pipelines(name: ScheduleName) -> Plan:
    pipelines = (
        pipeline_plan(name, range(2), 2, LAYERS_EACH),
        pipeline_plan(name, range(2, 4), 1, LAYERS_EACH),
    )
    return Plan(num_layers=2 * LAYERS_EACH, pipelines=pipelines)


def test_links_carry_every_gradient_once_a_step(pool: WorkerPool) -> None:
    plans = [two_pipelines("1f1b"), two_pipelines("dualpipe-v")]
    args = (plans, 1, BUCKET_S / BUCKET_BYTES)
    for rank in pool.run(run_steps, *args, world_size=4):
        for (times,) in rank:
            assert times.carried_s == pytest.approx(LAYERS_EACH * BUCKET_S)
            assert 0 < times.passes_s < times.step_s
