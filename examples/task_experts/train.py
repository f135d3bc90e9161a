"""Train experts by task on images, in one process or several.

    python examples/task_experts/train.py --steps 300
    torchrun --nproc-per-node 2 examples/task_experts/train.py --steps 300

Several processes have their own images and some of the experts each (``ep``); losses are those of
one process.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from task_experts.family import FAMILY
from task_experts.images import CLASSES, TASKS, batch
from task_experts.sizes import SMALL, VisionSpec
from weft.comm.address import RankAddress
from weft.config.optim_sections import AdamWConfig, CosineSchedule
from weft.models.registry import FAMILIES
from weft.nn.context import Context
from weft.nn.stage import STREAM, MicroBatch, Stage
from weft.optim.schedule import lr_at
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.precision.registry import PRECISIONS
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

OPTIM = AdamWConfig(lr=0.005, max_grad_norm=1.0, schedule=CosineSchedule(warmup=0.1))
SAMPLES = 48
HELD_OUT = range(10_000_000, 10_000_000 + 300)
"""Numbers of images that no step trains on."""


@dataclass
class Learnt:
    """What a rank has seen."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    accuracy: dict[str, float] = field(default_factory=dict)
    """By task, of images held out; where this rank has the whole model."""


def equal_parts(world_size: int, precision: str = "fp32") -> Plan:
    """One pipeline of one stage, whose ranks divide images and experts."""
    mesh = Mesh.of(tuple(range(world_size)), ep=world_size)
    stage = StagePlan(mesh=mesh, layers=(0, SMALL.num_layers), precision=precision)
    pipeline = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
    return Plan(num_layers=SMALL.num_layers, pipelines=(pipeline,))


def train(address: RankAddress, plan: Plan, steps: int, *, spec: VisionSpec = SMALL) -> Learnt:
    """One rank among those of a plan."""
    assert FAMILIES[spec.family] is FAMILY
    comm, _ = join_plan(address, plan)
    precision = PRECISIONS[plan.rank_plan(comm.rank).stage_plan.precision].compute.dtype
    learnt = Learnt()
    try:
        built = assemble_model(plan, spec, comm, optim=OPTIM, seq_len=spec.seq_len)
        fill(built.gradients, initial(seed=1))
        for step in range(steps):
            built.optimizer.lr = lr_at(OPTIM, step, steps)
            first = step * plan.global_batch
            parts = plan.rank_plan(comm.rank).microbatches()
            samples = [
                MicroBatch(batch((first + number for number in part), precision), Context())
                for part in parts
            ]
            result = built.engine.step(samples)
            learnt.losses.append(float(result.loss))
            learnt.grad_norms.append(float(result.grad_norm))
            if comm.rank == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {learnt.losses[-1]:.4f}", flush=True)
        built.gradients.fence()
        if plan.world_size == 1:
            learnt.accuracy = accuracy(built.stages[0], precision)
    finally:
        comm.close()
    return learnt


@torch.no_grad()
def accuracy(stage: Stage, precision: torch.dtype) -> dict[str, float]:
    """By task: how many images held out are of the class that scores highest of all tasks'."""
    images = batch(HELD_OUT, precision)
    output = stage.compute(images, Context())
    weight = stage.module.get_parameter("head.weight")
    found = (output.tree[STREAM][:, 0] @ weight.T).argmax(-1) == images["targets"][:, 0]
    return {
        name: float(found[images["tasks"] == task].double().mean())
        for task, name in enumerate(TASKS)
    }


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    address = RankAddress.from_environment() or RankAddress()
    learnt = train(address, equal_parts(address.world_size), asked.steps)
    for name, part in learnt.accuracy.items():
        print(f"{name}: {part:.1%} of images held out, chance {1 / sum(CLASSES):.1%}")
