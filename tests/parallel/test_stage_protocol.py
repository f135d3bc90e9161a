"""Stages that Weft has never seen: trees at borders, collectives of their own, terms, buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.nn.context import Context
from weft.nn.stage import STREAM, Buffer, MicroBatch, Output, Term, Terms, Tree, Unit
from weft.optim.pytorch import TorchOptimizer
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import PipelinePlan, Plan, RankPlan, ScheduleName, StagePlan
from weft.precision.registry import PRECISIONS
from weft.train.assemble import Assembled, Share, Source, assemble, whole_tilings
from weft.train.joining import join_plan

WIDTH, LAYERS, SAMPLES = 4, 4, 7
BORDER: Border = {
    STREAM: BorderTensor((Dim(name="rows", size=2), Dim(name="width", size=WIDTH))),
    "residual": BorderTensor((Dim(name="width", size=WIDTH),)),
    "kind": BorderTensor((), role="int64"),
    "mask": BorderTensor((Dim(name="rows", size=2),), role="bool"),
}
BUFFERS = [
    Buffer(name="scale", rule="constant", value=lambda: torch.tensor(0.5, dtype=torch.float64)),
    Buffer(name="seen", rule="sum", value=lambda: torch.zeros((), dtype=torch.int64)),
    Buffer(
        name="average", rule="mean", momentum=0.25,
        value=lambda: torch.ones(WIDTH, dtype=torch.float64),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Toy:
    """What a toy model does besides being four linear layers."""

    centers: bool = False
    """Layers take the mean over all samples of a microbatch off, whoever has them."""
    balances: bool = False
    """Every layer adds to a term of its own."""
    counts: bool = False
    """The first stage has buffers."""


class Center(torch.autograd.Function):
    """Off with the mean over the rows of all ranks; its backward is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, group: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.group = comm, group
        return centered(x, comm, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return centered(grad, ctx.comm, ctx.group), None, None


def centered(x: Tensor, comm: Comm, group: tuple[int, ...]) -> Tensor:
    sums = torch.cat([x.sum(0).flatten(), x.new_tensor([float(len(x))])])
    comm.all_reduce(sums, name="center", group=group)
    return x - (sums[:-1] / sums[-1]).view(x.shape[1:])


class ToyStage(nn.Module):
    def __init__(self, toy: Toy, layers: range, rank_plan: RankPlan, comm: Comm) -> None:
        super().__init__()
        self.toy, self.comm = toy, comm
        self.group = rank_plan.group("dp")
        self.first = layers.start == 0
        self.layers = nn.ModuleDict(
            {str(n): nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for n in layers}
        )
        self.units = {n: Unit(self.layers[str(n)], block=self.layers[str(n)]) for n in layers}
        if toy.counts and self.first:
            for buffer in BUFFERS:
                self.register_buffer(buffer.name, buffer.value())

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def spans_samples(self) -> bool:
        return self.toy.centers

    def compute(self, inputs: Tree, _context: Context, /) -> Output:
        x, mask, kind = inputs[STREAM], inputs["mask"], inputs["kind"]
        residual = inputs.get("residual", x.mean(1))
        assert (mask.dtype, kind.dtype) == (torch.bool, torch.int64)
        if self.toy.counts and self.first:
            self.seen += len(x)
            self.average += x.detach().mean(1).sum(0)
            x = x * self.scale
        balance = x.new_zeros(())
        for unit in self.units.values():
            x = x + torch.tanh(unit(x)) * mask[..., None] * (1 + kind[:, None, None])
            residual = residual + x.mean(1).square()
            if self.toy.centers:
                x = Center.apply(x, self.comm, self.group)
            balance = balance + 0.1 * x.square().sum()
        terms: Terms = {}
        if self.toy.balances:
            terms = {"balance": Term(balance, x.new_zeros(()))}
        return Output({STREAM: x, "residual": residual, "kind": kind, "mask": mask}, terms)


def objective(output: Tree, batch: Tree, /) -> Terms:
    losses = (output[STREAM].sum(1) + output["residual"] - batch["targets"]).square().sum(-1)
    weights = batch["weights"]
    return {"squares": Term((losses * weights).sum(), weights.sum())}


def source(toy: Toy, plan: Plan) -> Source:
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    specs = [
        ParamSpec(name=f"layers.{n}.{leaf}", shape=shape, unit=n, init=Init("zeros"), decay=False)
        for n in range(LAYERS)
        for leaf, shape in shapes.items()
    ]

    def stage(number: int, share: Share) -> ToyStage:
        layers = range(*share.rank_plan.pipeline_plan.stages[number].layers)
        stage = ToyStage(toy, layers, share.rank_plan, share.comm)
        for name, param in stage.named_parameters():
            generator = torch.Generator().manual_seed(int(name.split(".")[1]))
            with torch.no_grad():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 2)
        return stage

    return Source(
        specs=specs,
        tilings=whole_tilings(specs, plan),
        precision=PRECISIONS["fp64"],
        stage=stage,
        objective=lambda _last: objective,
        borders=dict.fromkeys(range(len(plan.pipelines[0].stages) - 1), BORDER),
        expected_weight=float(plan.global_batch),
        buffers=BUFFERS if toy.counts else [],
    )


def plan_of(
    dp: Sequence[int], *, microbatch: int = 2, schedule: ScheduleName = "1f1b", **settings: Any
) -> Plan:
    stages, rank, layer = [], 0, 0
    for size in dp:
        mesh = Mesh.of(range(rank, rank + size), dp=size)
        layers = (layer, layer + LAYERS // len(dp))
        stages.append(StagePlan(mesh=mesh, layers=layers, precision="fp64", **settings))
        rank, layer = rank + size, layers[1]
    pipeline = PipelinePlan(
        stages=tuple(stages), samples=SAMPLES, microbatch=microbatch, schedule=schedule
    )
    return Plan(num_layers=LAYERS, pipelines=(pipeline,))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    like: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return {
        STREAM: torch.randn(SAMPLES, 2, WIDTH, **like),
        "kind": torch.randint(3, (SAMPLES,), generator=generator),
        "mask": torch.randint(2, (SAMPLES, 2), generator=generator).bool(),
        "targets": torch.randn(SAMPLES, WIDTH, **like),
        "weights": torch.rand(SAMPLES, **like),
    }


def trained(address: RankAddress, plan: Plan, toy: Toy) -> dict[str, Any]:
    """Losses, and the parameters and buffers that this rank holds after three steps."""
    comm, _ = join_plan(address, plan)
    try:
        built: Assembled[TorchOptimizer] = assemble(plan, source(toy, plan), comm, sgd)
        losses = []
        for step in range(3):
            whole = MicroBatch(batch(step))
            parts = plan.rank_plan(comm.rank).microbatches()
            mine = [whole.rows(slice(part.start, part.stop)) for part in parts]
            losses.append(float(built.engine.step(mine).loss))
            built.executor.evaluate(mine)  # changes nothing
        built.gradients.fence()
        modules = [stage.module for stage in built.stages.values()]
        held = {n: t.tolist() for module in modules for n, t in module.state_dict().items()}
        return {"losses": losses, **held}
    finally:
        comm.close()


def sgd(gradients: Any) -> TorchOptimizer:
    values = [main.value for main in gradients.mains] or [torch.zeros(0)]
    return TorchOptimizer(torch.optim.SGD(values, lr=0.01), gradients)


def check(pool: WorkerPool, plan: Plan, toy: Toy, alone: Plan) -> None:
    (expected,) = pool.run(trained, alone, toy, world_size=1)
    assert len(set(expected["losses"])) == 3
    ranks = pool.run(trained, plan, toy, world_size=plan.world_size)
    assert {name for rank in ranks for name in rank} == set(expected)
    for rank in ranks:
        for name, value in rank.items():
            torch.testing.assert_close(
                torch.tensor(value, dtype=torch.float64),
                torch.tensor(expected[name], dtype=torch.float64),
                rtol=1e-10,
                atol=1e-12,
            )


PLANS = {
    "pp2": plan_of((1, 1)),
    "pp2-zb-h1-recompute": plan_of((1, 1), schedule="zb-h1", recompute="full"),
    "pp2-passes": plan_of((1, 1), microbatch=5, passes=2),
    "dp1-to-dp2": plan_of((1, 2), microbatch=3),
    "dp2-zero3": plan_of((2,), microbatch=3, zero=2),
}


@pytest.mark.parametrize("toy", [Toy(), Toy(balances=True)], ids=["plain", "balance"])
@pytest.mark.parametrize("name", PLANS)
def test_a_tree_crosses_and_every_stage_may_add_a_term(
    name: str, toy: Toy, pool: WorkerPool
) -> None:
    check(pool, PLANS[name], toy, plan_of((1,)))


@pytest.mark.parametrize("dp", [(2,), (3,), (2, 3)], ids=str)
def test_layers_may_talk_to_ranks_without_samples(dp: tuple[int, ...], pool: WorkerPool) -> None:
    """Seven samples, two at a time: ranks that have none of them compute all the same."""
    alone = plan_of((1,), microbatch=2)
    check(pool, plan_of(dp, microbatch=2), Toy(centers=True), alone)


@pytest.mark.parametrize("name", PLANS)
def test_buffers_are_the_same_however_samples_are_divided(name: str, pool: WorkerPool) -> None:
    toy = Toy(counts=True)
    check(pool, PLANS[name], toy, plan_of((1,), microbatch=SAMPLES))
    (found,) = pool.run(trained, plan_of((1,)), toy, world_size=1)
    assert found["seen"] == 3 * SAMPLES and found["scale"] == 0.5
    average = torch.ones(WIDTH, dtype=torch.float64)
    for step in range(3):
        average = average.lerp(batch(step)[STREAM].mean((0, 1)), 0.25)
    torch.testing.assert_close(
        torch.tensor(found["average"], dtype=torch.float64), average, rtol=1e-12, atol=0
    )


def test_ranks_that_share_samples_refuse_buffers_that_change() -> None:
    whole = plan_of((1,)).pipelines[0]
    stage = replace(whole.stages[0], mesh=Mesh.of((0, 1), tp=2))
    plan = Plan(num_layers=LAYERS, pipelines=(replace(whole, stages=(stage,)),))
    with pytest.raises(ConfigError, match=r"model.seen = 'sum': expected constant in a plan"):
        assemble(plan, source(Toy(counts=True), plan), Comm(), sgd)
