"""Copies of a model that would go apart in silence are refused, and numbers that make no sense."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau

import weft
from weft.api.distributed import join_model
from weft.api.engine import WovenEngine
from weft.api.weave import woven
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool

BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square()
    return result


def engine_of(make: Callable[..., Optimizer] = SGD, **settings: Any) -> WovenEngine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return weft.weave(model, make(model.parameters(), lr=0.1), loss=squares, **settings)


def trains(address: RankAddress, kind: str) -> str:
    """What is said of four steps on two processes."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    other = kind if comm.rank else "alike"
    sgd = SGD(model.parameters(), lr=0.2 if other == "lr" else 0.1)
    try:
        if kind in ("norm", "own loop"):
            join_model(model, comm)
            norm = 0.2 if other == "norm" else 0.1
            weft.distributed_optimizer(sgd, model, max_grad_norm=norm)
            sgd.param_groups[0]["momentum"] = 0.5 if other == "own loop" else 0.0
            squares(model, BATCH).mean().backward()
            sgd.step(weight=4)
            return ""
        engine = woven(model, sgd, comm, loss=squares)
        if other == "values":
            model.load_state_dict({n: v + 1e-3 for n, v in model.state_dict().items()})
        schedule = ExponentialLR(sgd, 0.25 if other == "schedule" else 0.5)
        for _ in range(4):
            if other == "evaluation":
                engine.eval_batch(BATCH)
            engine.train_batch(BATCH, lr=0.2 if other == "rate" else schedule)
    except ConfigError as error:
        return str(error)
    finally:
        comm.close()
    return ""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("lr", "optimizer: lr = '0.2 for weight on rank 1': expected 0.1, as on rank 0"),
        ("rate", "optimizer: lr = '0.2 for weight on rank 1': expected 0.1, as on rank 0"),
        ("schedule", "optimizer: lr = '0.025 for weight on rank 1': expected 0.05, as on rank 0"),
        ("values", "model = 'weight on rank 1': expected the values that it has on rank 0"),
        ("norm", "max_grad_norm = 0.2: expected 0.1, as on rank 0"),
        ("own loop", "optimizer: momentum = '0.5 for weight on rank 1': expected 0.0, as on rank"),
        ("evaluation", "call = 'engine.eval_batch on rank 1': expected engine.step, as on"),
        ("nothing", ""),
    ],
)
def test_copies_that_would_go_apart(kind: str, expected: str, pool: WorkerPool) -> None:
    """Of all of these the losses look as they should, on every process."""
    one, other = pool.run(trains, kind, world_size=2)
    assert one == other
    assert expected in one and bool(expected) == bool(one)


@pytest.mark.parametrize("norm", [-1.0, 0, float("nan"), float("inf"), "1", True])
def test_no_such_norm(norm: Any) -> None:
    """A negative one would climb, and 0 would never move."""
    model = nn.Linear(3, 2)
    layers = [weft.Layer(nn.Linear, 3, 2)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1)
    make = partial(SGD, lr=0.1)
    for call in (
        lambda: engine_of(max_grad_norm=norm),
        lambda: weft.distributed_optimizer(
            SGD(model.parameters()), weft.distributed_model(model), max_grad_norm=norm
        ),
        lambda: weft.weave_layers(layers, make, loss=torch.sub, plan=plan, max_grad_norm=norm),
    ):
        with pytest.raises(ConfigError, match=r"^max_grad_norm = .*expected a finite number > 0"):
            call()


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), True, "0.1"])
def test_no_such_learning_rate(lr: Any) -> None:
    engine = engine_of()
    before = [param.detach().clone() for param in engine.layers[0].parameters()]
    with pytest.raises(ConfigError, match=r"^lr = .*expected a finite number >= 0"):
        engine.train_batch(BATCH, lr=lr)
    assert all(map(torch.equal, before, engine.layers[0].parameters()))
    assert engine.train_batch(BATCH, lr=0) > 0


def test_schedules_that_want_to_know_more() -> None:
    """One that asks for a metric after the update cannot be refused by then."""
    engine = engine_of()
    with pytest.raises(ConfigError, match=r"It wants metrics: call engine\.step"):
        engine.train_batch(BATCH, lr=ReduceLROnPlateau(engine.optimizer))  # type: ignore[arg-type]
    assert engine.last is None
    engine.train_batch(BATCH, lr=CosineAnnealingLR(engine.optimizer, 5))
    assert engine.optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize(
    ("saved", "own", "lacks"),
    [(SGD, AdamW, "betas"), (AdamW, SGD, "momentum"), (Adam, NAdam, "mu_product"), (SGD, SGD, "")],
)
def test_states_of_other_optimizers(
    saved: type[Optimizer], own: type[Optimizer], lacks: str
) -> None:
    states = {}
    for make in (saved, own):
        engine = engine_of(make)
        engine.step(BATCH)
        states[make] = engine.state_dict()
    if not lacks:
        engine.load_state_dict(states[saved])
        return
    for state in (states[saved], {**states[own], "optimizer": {}}):
        with pytest.raises(ConfigError, match=f"state.optimizer = .*{own.__name__} was"):
            engine.load_state_dict(state)
    twin = engine_of(own)
    twin.step(BATCH)
    assert engine.step(BATCH) == twin.step(BATCH), "nothing was changed"


LAYERS = [weft.Layer(nn.Linear, 3, 2)]
PLAN = weft.split(LAYERS, samples=4, microbatch=2, meshes=1)
LAZY = [weft.Layer(nn.LazyLinear, 2)]
LAZY_HINT = "expected tensors of known shapes. Call the model once"
layered = partial(weft.weave_layers, loss=torch.sub, plan=PLAN)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: weft.weave(nn.Linear(3, 2), SGD), "optimizer = 'SGD'"),  # type: ignore[arg-type]
    "none": (lambda: weft.weave(nn.Linear(3, 2), None), "optimizer = 'NoneType'"),  # type: ignore[arg-type]
    "built": (lambda: layered(LAYERS, SGD([torch.zeros(1)])), "optimizer = 'SGD': .*partial"),
    "seed": (lambda: layered(LAYERS, partial(SGD, lr=0.1), seed=True), "seed = true"),
    "schedule": (
        lambda: weft.split(LAYERS, samples=4, microbatch=2, schedule="foo"),  # type: ignore[arg-type]
        "schedule = 'foo': expected one of gpipe, 1f1b",
    ),
    "samples": (lambda: weft.split(LAYERS, samples=0, microbatch=2), "samples = 0: .* >= 1"),
    "a module": (
        lambda: weft.split([nn.Linear(3, 2)], samples=4, microbatch=2),  # type: ignore[list-item]
        r"layers\[0\] = 'Linear': .*weft.Layer\(",
    ),
    "lazy": (
        lambda: weft.weave(model := nn.LazyLinear(2), SGD(model.parameters(), lr=0.1)),
        f"model.weight = 'uninitialized': {LAZY_HINT}",
    ),
    "lazy in a loop": (
        lambda: weft.distributed_model(nn.Sequential(nn.LazyLinear(2))),
        f"model.0.weight = 'uninitialized': {LAZY_HINT}",
    ),
    "lazy layer": (
        lambda: layered(LAZY, partial(SGD, lr=0.1)),
        r"layers\[0\].weight = 'uninitialized': .*Build what says its sizes",
    ),
    "lazy split": (
        lambda: weft.split(LAZY, "parameters", samples=4, microbatch=2),
        r"layers\[0\].weight = 'uninitialized'",
    ),
    "detached": (
        lambda: weft.weave(
            model := nn.Linear(3, 2),
            SGD(model.parameters()),
            loss=lambda m, b: m(b[0]).detach(),
        ).step(BATCH),
        "loss = 'losses without gradients'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_said_by_name(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        call()


def test_lazy_modules_that_were_called_once() -> None:
    model = nn.LazyLinear(2)
    sgd = SGD(model.parameters(), lr=0.1)
    model(BATCH[0])
    assert weft.weave(model, sgd, loss=squares).step(BATCH) > 0
