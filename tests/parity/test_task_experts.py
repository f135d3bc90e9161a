"""The example of experts by task: it learns from real images, and under every plan the same."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from parity.cases import Case

from weft.comm.address import RankAddress
from weft.diagnose.verify import one_process
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # in every process that imports this
from task_experts.sizes import SMALL

STEPS = 3
FOUR_LAYERS = replace(SMALL, num_layers=4)
CASES = [
    Case("ep2-tp2-idle-rank", shares=(3,), dp=((1,),), ep=((2,),), tp=((2,),), microbatch=2),
    Case("border-dp2-ep2-zero2", shares=(6,), dp=((1, 2),), ep=((2, 1),), layers=((1, 3),),
         microbatch=3, zeros=(2, 2), recompute="full"),
    Case("cp2-beside-ep2-zero3", shares=(4, 2), dp=((1,), (1,)), ep=((1,), (2,)),
         cp=((2,), (1,)), zero=0),
]  # fmt: skip


def run_images(address: RankAddress, plan: Plan) -> dict[str, Any]:
    """One rank. Only processes of ranks import the family, which adds it to them."""
    example = import_module("task_experts.train")
    return vars(example.train(address, plan, STEPS, spec=FOUR_LAYERS))


def run_example(address: RankAddress) -> dict[str, Any]:
    example = import_module("task_experts.train")
    return vars(example.train(address, example.equal_parts(1), 150))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_images_train_under_any_plan_as_in_one_process(case: Case, pool: WorkerPool) -> None:
    plan = case.plan()
    (alone,) = pool.run(run_images, one_process(plan), world_size=1)
    assert len(set(alone["losses"])) == STEPS, "the losses never changed"
    for found in pool.run(run_images, plan, world_size=plan.world_size):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert found["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-10)


def test_experts_alone_tell_the_model_its_task(pool: WorkerPool) -> None:
    """150 steps, in seconds: most corners are found and some digits, among classes of all tasks."""
    (learnt,) = pool.run(run_example, world_size=1)
    found = learnt["accuracy"]
    assert learnt["losses"][-1] < 0.6 * learnt["losses"][0]
    assert found["corner"] > 0.9 and min(found.values()) > 0.2, found
