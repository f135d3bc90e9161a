"""A limit of what ranks keep of their micro-batches: kept to, and no dearer than it asks."""

from dataclasses import replace
from itertools import product

import pytest
from resolve.test_resolve import refused, resolved

from weft.cost.choice import choice_of
from weft.cost.memory import memory_of_plan
from weft.cost.rates import compute_seconds
from weft.models.registry import shape_of
from weft.plan.plan import Plan
from weft.resolve.kept import USUAL
from weft.resolve.resolve import Resolved

STAGES = "plan.stages=[{layers: 2}, {recompute: full}, {layers: 2}]"
DEEP = ["model.num_layers=6", STAGES, "batch.micro=4"]


def kept(found: Resolved, plan: Plan) -> list[float]:
    """MiB of activations, by stage."""
    spec, training = found.spec, found.training
    memory = memory_of_plan(plan, spec, found.config.data.seq_len, training=training)
    return [memory[rank].activations / 2**20 for rank in range(3)]


def seconds(found: Resolved, plan: Plan, stage: int) -> float:
    choice = choice_of(plan.pipelines[0], stage, found.config.data.seq_len)
    return compute_seconds(shape_of(found.spec), choice.work, USUAL).whole_s


def recomputing(plan: Plan, stage: int, text: str) -> Plan:
    (pipeline,) = plan.pipelines
    stages = list(pipeline.stages)
    stages[stage] = replace(stages[stage], recompute=text)
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def test_each_stage_keeps_what_it_may_and_computes_the_least_again() -> None:
    free = resolved(DEEP)
    most, least = max(kept(free, free.plan)), 0.0
    chosen = set()
    bases = ("", "activation", "feed_forward", "attention", "core", "attention+feed_forward")
    texts = [b or "off" for b in bases] + ["full"]
    texts += [f"{b}+full:{n}".lstrip("+") for b, n in product(bases, (1,))]
    for part in (1.0, 0.8, 0.6, 0.45):
        found = resolved([*DEEP, f"compute.activations_gib={part * most / 1024}"])
        plan = found.plan
        assert plan.pipelines[0].stages[1].recompute == "full"
        for stage in (0, 2):
            chosen.add(plan.pipelines[0].stages[stage].recompute)
            assert kept(found, plan)[stage] <= part * most * (1 + 1e-9)
            for text in texts:
                other = recomputing(plan, stage, text)
                if kept(found, other)[stage] <= part * most:
                    assert seconds(found, other, stage) >= seconds(found, plan, stage) * (1 - 1e-9)
        least = min(least or most, kept(found, plan)[0])
    assert "off" in chosen
    assert len(chosen) > 3, chosen


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["compute.activations_gib=1e-6"], "at least"),
        (["compute.activations_gib=1e-5", "plan.stages=[{recompute: off}]"], "as its `recompute`"),
        (["compute.activations_gib=1", "compute.recompute=full"], "Leave one of the two out"),
    ],
)
def test_refused(overrides: list[str], said: str) -> None:
    assert said in refused([*DEEP, *overrides])
