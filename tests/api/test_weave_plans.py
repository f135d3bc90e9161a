"""Woven models under plans: shared optimizer state, unequal parts, settings of each parameter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.api.engine import WovenEngine
from weft.api.weave import woven
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

TOLERANCE = 1e-10
"""fp64 rounding is 1e-16; Adam's division leaves 1e-12."""
STEPS = 4


def side_by_side(*pipelines: tuple[int, int, int], zero: int) -> Plan:
    """Pipelines of one stage: (ranks, samples, microbatch)."""
    found, first = [], 0
    for ranks, samples, microbatch in pipelines:
        mesh = Mesh.of(range(first, first + ranks), dp=ranks)
        stage = StagePlan(mesh=mesh, layers=(0, 1), precision="fp64", zero=zero)  # type: ignore[arg-type]
        found.append(PipelinePlan(stages=(stage,), samples=samples, microbatch=microbatch))
        first += ranks
    return Plan(num_layers=1, pipelines=tuple(found))


PLANS = {
    "zero0": side_by_side((2, 7, 3), zero=0),
    "zero1": side_by_side((2, 7, 3), zero=1),
    "zero2": side_by_side((2, 7, 3), zero=2),
    "zero2-idle-rank": side_by_side((3, 7, 2), zero=2),
    "unlike-pipelines-zero1": side_by_side((1, 5, 2), (2, 2, 1), zero=1),
    "unlike-pipelines-zero2": side_by_side((2, 5, 3), (1, 2, 2), zero=2),
}


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Groups of unlike settings, one with names, and a frozen parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    model[0].bias.requires_grad_(False)
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2]
    vectors = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.5},
        {"params": vectors, "lr": 0.1, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, eps=1e-3)


def batch(step: int, samples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 3, generator=generator, dtype=torch.float64)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square()


def values(model: nn.Module) -> list[np.ndarray]:
    return [param.detach().numpy().copy() for param in model.parameters()]


def train_woven(
    address: RankAddress, plan: Plan
) -> tuple[list[float], list[np.ndarray], list[int]]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    model, adamw = model_and_optimizer()
    engine = woven(model, adamw, comm, loss=squares, plan=plan, max_grad_norm=0.5)
    losses = [float(engine.train_batch(batch(step))) for step in range(STEPS)]
    losses.append(float(engine.eval_batch(batch(STEPS))))
    kept = [sum(p.numel() for p in group["params"]) for group in adamw.param_groups]
    comm.close()
    return losses, values(model), kept


def plain() -> tuple[list[float], list[np.ndarray]]:
    model, adamw = model_and_optimizer()
    losses = []
    for step in range(STEPS):
        loss = squares(model, batch(step)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    losses.append(squares(model, batch(STEPS)).mean().item())
    return losses, values(model)


@pytest.mark.parametrize("name", PLANS)
def test_matches_a_plain_loop(name: str, pool: WorkerPool) -> None:
    plan = PLANS[name]
    losses, expected = plain()
    assert len(set(losses)) == len(losses), "the losses never changed"
    results = pool.run(train_woven, plan, world_size=plan.world_size)
    for found, parameters, _ in results:
        np.testing.assert_allclose(found, losses, rtol=TOLERANCE)
        for one, other in zip(parameters, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    kept = np.array([kept for _, _, kept in results])
    matrices, trained_vectors, frozen = 9 * 5 + 3 * 9, 3, 9
    times = 1 if "zero0" not in name else plan.world_size
    everyone = [times * matrices, times * trained_vectors + frozen * plan.world_size]
    assert kept.sum(0).tolist() == everyone


class Turned(nn.Module):
    """Parameters that do not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(5, 4, dtype=torch.float64).t())
        self.conv = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.conv((x @ self.turned.t()).view(-1, 2, 2, 1).expand(-1, -1, -1, 2))
        return seen.flatten(1)


def train_fused(comm: Comm | None) -> list[np.ndarray]:
    """Without ``comm`` a plain loop."""
    model = Turned()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    plan = side_by_side((2, 7, 3), zero=0)
    engine = comm and woven(model, adamw, comm, loss=squares, plan=plan)
    for step in range(STEPS):
        if engine:
            engine.train_batch(batch(step))
        else:
            squares(model, batch(step)).mean().backward()
            adamw.step()
            adamw.zero_grad()
    return values(model)


def fused_in_pool(address: RankAddress) -> list[np.ndarray]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    found = train_fused(comm)
    comm.close()
    return found


def test_fused_kernels_get_gradients_that_lie_as_parameters_do(pool: WorkerPool) -> None:
    """They look at no strides: another element's gradient updated each."""
    for found in pool.run(fused_in_pool, world_size=2):
        for one, other in zip(found, train_fused(None), strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


class Sometimes(nn.Module):
    """A part that no sample uses, one that some use, and in some steps none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.never, self.some = nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.always(x)
        chosen = (x[:, 0] > 1).unsqueeze(1)
        return result + chosen * self.some(x) if chosen.any() else result


def train_sometimes(comm: Comm | None, plan: Plan | None = None) -> list[np.ndarray]:
    """After two steps another parameter is frozen. Without ``comm`` a plain loop."""
    torch.manual_seed(0)
    model = Sometimes().double()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, eps=1e-3)
    engine = woven(model, adamw, comm, loss=squares, plan=plan) if comm else None
    uses = []
    for step in range(6, 12):  # 2, 1, 0, 0, 1 and 0 samples use the part
        model.always.bias.requires_grad_(step < 8)
        uses.append(int((batch(step)[0][:, 0] > 1).sum()))
        if engine:
            engine.step(batch(step))
            continue
        squares(model, batch(step)).mean().backward()
        adamw.step()
        adamw.zero_grad()
    assert uses == [2, 1, 0, 0, 1, 0]
    return values(model)


def train_sometimes_rank(address: RankAddress, plan: Plan) -> list[np.ndarray]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    found = train_sometimes(comm, plan)
    comm.close()
    return found


@pytest.mark.parametrize("name", PLANS)
def test_what_no_process_used_is_left_alone_as_by_a_plain_loop(name: str, pool: WorkerPool) -> None:
    expected = train_sometimes(None)
    plan = PLANS[name]
    alone = side_by_side((1, 7, 3), zero=0)
    every = pool.run(train_sometimes_rank, plan, world_size=plan.world_size)
    for found in (train_sometimes(Comm(), alone), *every):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_plan_that_gathers_a_module_is_refused() -> None:
    (pipeline,) = side_by_side((1, 7, 3), zero=3).pipelines
    model, adamw = model_and_optimizer()
    with pytest.raises(ConfigError, match="zero = 3: expected 2 at most"):
        weft.weave(model, adamw, plan=Plan(num_layers=1, pipelines=(pipeline,)))
    stage = replace(pipeline.stages[0], zero=0, passes=2)
    plan = Plan(num_layers=1, pipelines=(replace(pipeline, stages=(stage,)),))
    with pytest.raises(ConfigError, match="A smaller micro-batch does the same"):
        weft.weave(model, adamw, plan=plan)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"precision": "bf16"}, r"precision = 'bf16': expected that of the model .torch.float64"),
        ({"precision": "fp8-fp64"}, r"precision = 'fp8-fp64': expected that of the model"),
        ({"device": "cuda"}, r"device = 'cuda': expected that of the model .cpu"),
        ({"zero": 1}, r"zero = 1: expected 0. No other rank"),
    ],
)
def test_a_plan_that_would_not_be_followed_is_refused(change: dict[str, Any], problem: str) -> None:
    (pipeline,) = side_by_side((1, 7, 3), zero=0).pipelines
    pipeline = replace(pipeline, stages=(replace(pipeline.stages[0], **change),))
    model, adamw = model_and_optimizer()
    with pytest.raises(ConfigError, match=problem):
        weft.weave(model, adamw, loss=squares, plan=Plan(num_layers=1, pipelines=(pipeline,)))


def woven_alone(**settings: Any) -> tuple[nn.Module, WovenEngine]:
    model, adamw = model_and_optimizer()
    return model, woven(model, adamw, Comm(), loss=squares, **settings)


def test_train_batch_is_step_to_the_bit() -> None:
    one, stepped = woven_alone()
    other, trained = woven_alone()
    for step in range(3):
        assert torch.equal(stepped.step(batch(step)), trained.train_batch(batch(step)))
    assert all(map(np.array_equal, values(one), values(other)))


def test_train_batch_uses_a_rate_or_steps_a_schedule() -> None:
    model, engine = woven_alone()
    start = values(model)
    engine.train_batch(batch(0), lr=0.0)
    assert all(map(np.array_equal, values(model), start))
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.0, 0.0]
    model, engine = woven_alone()
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
    engine.train_batch(batch(0), lr=schedule)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.05]
    assert not any(map(np.array_equal, [values(model)[0]], [start[0]]))
    stranger = torch.optim.lr_scheduler.StepLR(model_and_optimizer()[1], step_size=1)
    with pytest.raises(ConfigError, match=r"expected a schedule of engine.optimizer"):
        engine.train_batch(batch(0), lr=stranger)


def dropped(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch)
    return result


def test_eval_batch_changes_nothing_and_drops_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))
    model[2].eval()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = woven(model, sgd, Comm(), loss=dropped)
    x = torch.randn(6, 4)
    expected = model[0](x).mean().detach()
    torch.testing.assert_close(engine.eval_batch(x).float(), expected)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(param.grad is None for param in model.parameters())


LOADED = {
    "masters": side_by_side((1, 7, 3), zero=0),
    "shared masters": side_by_side((2, 7, 3), zero=1),
}


def load_between(address: RankAddress, plan: Plan) -> tuple[list[bool], list[np.ndarray]]:
    """Values written after a step, of all parameters and then of one element, and two steps."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = woven(model, sgd, comm, loss=squares, plan=plan, precision="bf16")
    low = [tuple(t.bfloat16() for t in batch(step)) for step in range(3)]
    engine.step(low[0])
    given = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(given)
    engine.train_batch(low[1], lr=0.0)
    kept = [torch.equal(value, given[name]) for name, value in model.state_dict().items()]
    engine.train_batch(low[1], lr=1e-3)
    masters = [p for group in sgd.param_groups for p in group["params"]]
    before = [master.detach().clone() for master in masters]
    with torch.no_grad():
        model[0].weight[0, 0] = 7
    engine.train_batch(low[2], lr=0.0)
    changed = [(a - b).numpy() for a, b in zip(masters, before, strict=True)]
    kept.append(float(model[0].weight[0, 0]) == 7)
    comm.close()
    return kept, changed


@pytest.mark.parametrize("name", LOADED)
def test_what_is_loaded_between_steps_stays(name: str, pool: WorkerPool) -> None:
    plan = LOADED[name]
    results = pool.run(load_between, plan, world_size=plan.world_size)
    assert all(all(kept) for kept, _ in results)
    changed = [change for _, changes in results for change in changes]
    assert sum(int((change != 0).sum()) for change in changed) == 1, "the rest was rounded"


def under_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def with_other_memory(model: nn.Module) -> None:
    halves = 0.5 * nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(halves, model.parameters())


def halved_between(address: RankAddress, plan: Plan, precision: str) -> list[list[np.ndarray]]:
    """What three steps make of parameters that were halved after the first, in each way to do so,
    and of others that were not."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    found = []
    for halve in (under_no_grad, through_data, with_other_memory, lambda _: None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = woven(model, sgd, comm, loss=squares, plan=plan, precision=precision)
        for step in range(3):
            engine.step(tuple(t.to(model[0].weight.dtype) for t in batch(step)))
            if step == 0:
                halve(model)
        found.append([p.detach().float().numpy() for p in model.parameters()])
    comm.close()
    return found


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_however_values_are_written_they_stay(name: str, precision: str, pool: WorkerPool) -> None:
    plan = LOADED[name]
    for result in pool.run(halved_between, plan, precision, world_size=plan.world_size):
        expected, *others, unchanged = result
        for other in others:
            assert all(map(np.array_equal, expected, other))
        assert not any(map(np.array_equal, expected, unchanged))


def test_what_is_saved_has_what_was_written() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = woven(model, sgd, Comm(), loss=squares, precision="bf16")
    engine.step(tuple(t.bfloat16() for t in batch(0)))
    through_data(model)
    exact = engine.state_dict()["exact"]
    assert len(exact) == 2
    for master, param in zip(exact.values(), model.parameters(), strict=True):
        assert torch.equal(master.bfloat16(), param)


def test_another_dtype_after_weaving_is_refused() -> None:
    model, engine = woven_alone()
    model[2].float()
    with pytest.raises(ConfigError, match=r"model: 2.weight = 'torch.float32.*as when its model"):
        engine.step(batch(0))


def test_parameters_that_were_not_trained_when_woven_are_refused() -> None:
    model, engine = woven_alone()
    model[0].bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0.bias': expected a parameter that was trained"):
        engine.step(batch(0))
    model[0].bias.requires_grad_(False)
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    with pytest.raises(ConfigError, match="assign=False"):
        engine.step(batch(0))
