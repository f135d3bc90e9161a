"""The Python surfaces on processors and chips together: a list of layers, and a plain model."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from chipb.chip import with_chips
from chipb.test_chipb_jobs import on
from torch import Tensor, nn

from weft.api.layer_list import Layer
from weft.api.weave import woven
from weft.api.weave_layers import build_layers
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.train.joining import join_plan

STEPS, TOLERANCE = 3, 1e-10
LAYERS = [Layer(nn.Linear, 5, 7), Layer(nn.Tanh), Layer(nn.Linear, 7, 4), Layer(nn.Linear, 4, 3)]
OPTIMIZER = partial(torch.optim.AdamW, lr=0.05)


def squares(result: Tensor, targets: Tensor) -> Tensor:
    return (result - targets).square().sum(-1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    return draw(6, 5), draw(6, 3)


def plan_of(shares: tuple[int, ...], layers: tuple[int, ...]) -> Plan:
    """A pipeline for each share, a stage of one rank for each number of layers."""
    pipelines, rank = [], 0
    for share in shares:
        stages, first = [], 0
        for count in layers:
            mesh, part = Mesh.of((rank,), dp=1), (first, first + count)
            stages.append(StagePlan(mesh=mesh, layers=part, precision="fp64", zero=1))
            rank, first = rank + 1, first + count
        pipelines.append(PipelinePlan(stages=tuple(stages), samples=share, microbatch=2))
    return Plan(num_layers=sum(layers), pipelines=tuple(pipelines))


def listed(address: RankAddress, plan: Plan) -> list[float]:
    comm, _ = join_plan(address, plan)
    engine = build_layers(
        LAYERS, OPTIMIZER, comm, loss=squares, plan=plan, seed=3, max_grad_norm=0.5
    )
    losses = [float(engine.train_batch(batch(step))) for step in range(STEPS)]
    comm.close()
    return losses


def plain(address: RankAddress, plan: Plan) -> list[float]:
    comm, _ = join_plan(address, plan)
    torch.manual_seed(address.rank)  # all start from rank 0's values
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().to(comm.device)
    engine = woven(
        model,
        OPTIMIZER(model.parameters()),
        comm,
        loss=lambda m, b: squares(m(b[0]), b[1]),
        plan=plan,
        max_grad_norm=0.5,
    )
    losses = []
    for step in range(STEPS):
        parts = tuple(tensor.to(comm.device) for tensor in batch(step))
        losses.append(float(engine.step(parts)))
    comm.close()
    return losses


CASES = [
    (listed, plan_of((6,), (2, 2)), "cpu chipb"),
    (listed, plan_of((4, 2), (1, 3)), "chipb cpu | cpu chipb"),
    (plain, plan_of((4, 2), (4,)), "cpu | chipb"),
]


@pytest.mark.parametrize(("job", "plan", "families"), CASES, ids=["border", "pipelines", "weave"])
def test_matches_one_processor(job: object, plan: Plan, families: str, chips: WorkerPool) -> None:
    (alone,) = chips.run(with_chips, job, plan_of((6,), (4,)), world_size=1)
    assert len(set(alone)) == STEPS, "the losses never changed"
    for losses in chips.run(with_chips, job, on(plan, families), world_size=plan.world_size):
        assert losses == pytest.approx(alone, rel=TOLERANCE)


def in_eight_bits(address: RankAddress, plan: Plan, *, emulate: bool) -> list[str]:
    """What is said of products in eight bits, where both ways of asking for them are refused."""
    comm, _ = join_plan(address, plan)
    said = []
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)).to(comm.device)
    for make in (
        lambda: woven(
            model,
            OPTIMIZER(model.parameters()),
            comm,
            loss=lambda m, b: squares(m(b[0]), b[1]),
            precision="fp8",
            emulate_fp8=emulate,
        ),
        lambda: build_layers(LAYERS, OPTIMIZER, comm, loss=squares, plan=plan, emulate_fp8=emulate),
    ):
        try:
            make()
        except ConfigError as error:
            said.append(str(error))
    comm.close()
    return said


def test_no_units_for_eight_bits(chips: WorkerPool) -> None:
    """Also where only another process lacks them; a processor emulates without being asked."""
    eight = plan_of((4, 2), (4,)).each(lambda stage: replace(stage, precision="fp8"))
    mixed, cpus = on(eight, "cpu | chipb"), on(eight, "cpu | cpu")
    refusal = (
        "precision = 'fp8': expected a precision that chipb has units for. Take bf16; "
        "emulate_fp8=True rounds as fp8 does and multiplies as bf16, slower than bf16."
    )
    for plan, emulate, expected in (
        (mixed, False, 2 * [refusal]),
        (mixed, True, []),
        (cpus, False, []),
    ):
        job = partial(in_eight_bits, emulate=emulate)
        assert chips.run(with_chips, job, plan, world_size=2) == 2 * [expected]
