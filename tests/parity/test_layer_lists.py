"""Lists of layers under every kind of plan against a plain PyTorch loop: fp64, four steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.api.weave_layers import build_layers
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

TOLERANCE = 1e-10
"""fp64 rounding is 1e-16; Adam's division leaves 1e-12."""
STEPS, SAMPLES, SEQ, VOCAB = 4, 7, 5, 11
BUILT: list[str] = []
"""Modules that this process has built with memory, by class."""


class Counted(nn.Module):
    """A module of one linear layer that says when it gets memory."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_in, d_out)
        if self.inner.weight.device.type != "meta":
            BUILT.append(f"{d_in}-{d_out}")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh() if x.shape[-1] == self.inner.out_features else self.inner(x)


def head(embed: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embed.weight.T


EMBED = partial(weft.shared, "embed", nn.Embedding, VOCAB, 6)
LAYERS = [
    EMBED(),
    weft.Layer(Counted, 6, 8),
    weft.Layer(nn.Tanh),
    weft.Layer(nn.Linear, 8, 8),
    weft.shared("twice", Counted, 8, 8),
    weft.shared("twice", Counted, 8, 8),
    weft.Layer(nn.Linear, 8, 6, bias=False),
    weft.Layer(nn.LayerNorm, 6),
    EMBED(forward=head),
]
"""Borders of unlike width; parameters shared by both ends, and by neighbours."""
OPTIMIZER = partial(torch.optim.AdamW, lr=0.02, eps=1e-3, weight_decay=0.1)


def losses_of(output: Tensor, targets: Tensor) -> Tensor:
    """``[batch, seq]``"""
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="none")


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    weights = torch.rand(SAMPLES, SEQ, generator=generator, dtype=torch.float64)
    return tokens[:, :-1], tokens[:, 1:], weights


def line(by: Any, **settings: Any) -> Plan:
    settings = {"microbatch": 2, "precision": "fp64", **settings}
    return weft.split(LAYERS, by, samples=SAMPLES, **settings)


def unlike_pipelines(zero: int) -> Plan:
    """Two pipelines: three stages of one rank, and two of two and one."""

    def stages(*cuts: int, meshes: list[Mesh]) -> tuple[StagePlan, ...]:
        ends = zip((0, *cuts), (*cuts, len(LAYERS)), meshes, strict=True)
        return tuple(
            StagePlan(mesh=m, layers=(a, b), precision="fp64", zero=zero)  # type: ignore[arg-type]
            for a, b, m in ends
        )

    one = stages(2, 6, meshes=[Mesh.of((r,), dp=1) for r in range(3)])
    other = stages(5, meshes=[Mesh.of((3, 4), dp=2), Mesh.of((5,), dp=1)])
    first = PipelinePlan(stages=one, samples=4, microbatch=1)
    second = PipelinePlan(stages=other, samples=3, microbatch=2, schedule="gpipe")
    return Plan(num_layers=len(LAYERS), pipelines=(first, second))


PLANS: dict[str, Callable[[], Plan]] = {
    "one-process": partial(line, "uniform", meshes=1),
    "passes": partial(line, "uniform", meshes=1, microbatch=5, passes=2),
    "dp2": partial(line, "uniform", meshes=1, dp=2),
    "dp3-idle-rank-zero2": partial(line, "uniform", meshes=1, dp=3, zero=2),
    "1f1b": partial(line, "uniform", meshes=2),
    "1f1b-unlike": partial(line, [1, 6, 2], meshes=3, microbatch=1),
    "1f1b-empty-middle": partial(line, [3, 0, 6], meshes=3),
    "gpipe-parameters": partial(line, "parameters", meshes=2, schedule="gpipe"),
    "interleaved": partial(line, [2, 3, 1, 3], meshes=2, schedule="interleaved"),
    "zb-h1": partial(line, [5, 4], meshes=2, schedule="zb-h1"),
    "zb-h1-recompute-zero1": partial(
        line, [4, 5], meshes=2, dp=2, schedule="zb-h1", recompute="full", zero=1
    ),
    "zb-v": partial(line, [1, 2, 4, 2], meshes=2, schedule="zb-v"),
    "zb-v-dp2-zero2": partial(line, [2, 3, 2, 2], meshes=2, dp=2, schedule="zb-v", zero=2),
    "dualpipe-v": partial(line, "uniform", meshes=2, schedule="dualpipe-v", microbatch=1),
    "unlike-pipelines": partial(unlike_pipelines, 0),
    "unlike-pipelines-zero1": partial(unlike_pipelines, 1),
}


def values(layers: Any) -> dict[str, np.ndarray]:
    return {
        f"{number}.{name}": value.detach().numpy().copy()
        for number, layer in layers.items()
        for name, value in layer.state_dict().items()
    }


def train(comm: Comm, plan: Plan) -> dict[str, Any]:
    BUILT.clear()
    engine = build_layers(
        LAYERS, OPTIMIZER, comm, loss=losses_of, plan=plan, seed=3, max_grad_norm=0.5
    )
    found: dict[str, Any] = {"built": sorted(BUILT), "start": values(engine.layers), "norms": []}
    found["losses"] = []
    for step in range(STEPS):
        found["losses"].append(float(engine.train_batch(batch(step))))
        assert engine.last is not None
        found["norms"].append(float(engine.last.grad_norm))
    found["losses"].append(float(engine.eval_batch(batch(STEPS))))
    found["end"] = values(engine.layers)
    return found


def train_rank(address: RankAddress, plan: Plan) -> dict[str, Any]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    try:
        return train(comm, plan)
    finally:
        comm.close()


class Plain(nn.Module):
    """The same model as a person writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.up, self.mix, self.twice = Counted(6, 8), nn.Linear(8, 8), Counted(8, 8)
        self.down, self.norm = nn.Linear(8, 6, bias=False), nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.up(self.embed(tokens)).tanh())
        x = self.twice(self.twice(x))
        return self.norm(self.down(x)) @ self.embed.weight.T

    def by_number(self) -> dict[int, nn.Module]:
        parts = {0: self.embed, 1: self.up, 3: self.mix, 4: self.twice, 5: self.twice}
        return {**parts, 6: self.down, 7: self.norm, 8: self.embed}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """A plain loop from the values of one process."""
    start = train(Comm(), line("uniform", meshes=1))["start"]
    model = Plain().double()
    for number, part in model.by_number().items():
        for name, value in part.state_dict().items():
            value.copy_(torch.from_numpy(start[f"{number}.{name}"]))
    adamw = OPTIMIZER(model.parameters())
    found: dict[str, Any] = {"start": start, "losses": [], "norms": []}
    for step in range(STEPS + 1):
        tokens, targets, weights = batch(step)
        loss = (losses_of(model(tokens), targets) * weights).sum() / weights.sum()
        found["losses"].append(loss.item())
        if step == STEPS:
            break
        loss.backward()
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adamw.step()
        adamw.zero_grad()
    return {**found, "end": values(model.by_number())}


@pytest.mark.parametrize("name", PLANS)
def test_matches_a_plain_loop(name: str, pool: WorkerPool, plain: dict[str, Any]) -> None:
    plan = PLANS[name]()
    assert len(set(plain["losses"])) == STEPS + 1, "the losses never changed"
    results = pool.run(train_rank, plan, world_size=plan.world_size)
    for result in results:
        np.testing.assert_allclose(result["losses"], plain["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(result["norms"], plain["norms"], rtol=TOLERANCE)
        for key, value in result["end"].items():
            expected = plain["end"][key]
            np.testing.assert_allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
        for key, value in result["start"].items():
            assert np.array_equal(value, plain["start"][key]), key
    assert set().union(*(result["end"] for result in results)) == plain["end"].keys()


def test_each_process_builds_its_own_layers_alone(pool: WorkerPool) -> None:
    plan = line([2, 2, 1, 4], meshes=2, schedule="zb-v")
    inner, outer = "8-8", "6-8"
    first, second = pool.run(train_rank, plan, world_size=2)
    assert first["built"] == sorted([outer, inner]), "5, on the last stage, is 4's module"
    assert second["built"] == [inner]
    assert {key.partition(".")[0] for key in second["end"]} == {"3", "4"}
