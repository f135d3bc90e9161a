"""What an engine saves, and the same bits from there."""

import copy
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_weave_plans import batch, side_by_side, squares
from torch import Tensor, nn

import weft
from weft.api.engine import WovenEngine
from weft.api.weave import woven
from weft.api.weave_layers import build_layers
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.optim.pytorch import load_state
from weft.plan.plan import Plan

STEPS = 6
PLANS = {
    "one": side_by_side((1, 7, 3), zero=0),
    "zero1": side_by_side((2, 7, 3), zero=1),
    "zero2": side_by_side((2, 7, 3), zero=2),
    "unlike pipelines": side_by_side((1, 5, 2), (2, 2, 1), zero=2),
}
Loaded = tuple[WovenEngine, list[nn.Module]]


def low(step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    return x.bfloat16(), y.bfloat16()


def whole(comm: Comm, plan: Plan) -> Loaded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02)
    return woven(model, adamw, comm, loss=squares, plan=plan, precision="bf16"), [model]


def by_layers(comm: Comm) -> Loaded:
    layers = [weft.Layer(nn.Linear, 5, 9), weft.Layer(nn.Tanh), weft.Layer(nn.Linear, 9, 3)]
    plan = weft.split(layers, [2, 1], samples=7, microbatch=3, meshes=2, precision="bf16")
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    loss = lambda x, y: (x - y).square()  # noqa: E731
    engine = build_layers(layers, sgd, comm, loss=loss, plan=plan, seed=1)
    return engine, list(engine.layers.values())


def go_on(
    comm: Comm, make: Any, of_step: Any = low
) -> tuple[list[float], list[float], list[float]]:
    """Losses in one go; and from what was saved half way, the engine's loaded last or first."""

    def bits_of(made: Loaded, steps: range) -> list[float]:
        return [float(made[0].step(of_step(step))) for step in steps]

    at_once = bits_of(make(comm), range(STEPS))
    before = make(comm)
    first = bits_of(before, range(STEPS // 2))
    file = io.BytesIO()
    torch.save([[m.state_dict() for m in before[1]], before[0].state_dict()], file)
    found = []
    for engine_first in (False, True):
        file.seek(0)
        models, state = torch.load(file, weights_only=True)
        after = make(comm)
        if engine_first:
            after[0].load_state_dict(state)
        for model, saved in zip(after[1], models, strict=True):
            model.load_state_dict(saved)
        if not engine_first:
            after[0].load_state_dict(state)
        found.append(first + bits_of(after, range(STEPS // 2, STEPS)))
    return at_once, found[0], found[1]


def go_on_as_rank(address: RankAddress, make: Any) -> tuple[list[float], list[float], list[float]]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    found = go_on(comm, make)
    comm.close()
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_rounded_model_goes_on_to_the_bit(name: str, pool: WorkerPool) -> None:
    plan = PLANS[name]
    results = pool.run(go_on_as_rank, partial(whole, plan=plan), world_size=plan.world_size)
    for at_once, engine_last, engine_first in results:
        assert len({*at_once}) == STEPS, "the losses change"
        assert at_once == engine_last == engine_first


def test_layers_that_are_rounded_go_on_to_the_bit(pool: WorkerPool) -> None:
    for at_once, engine_last, engine_first in pool.run(go_on_as_rank, by_layers, world_size=2):
        assert len({*at_once}) == STEPS, "the losses change"
        assert at_once == engine_last == engine_first


def in_eight_bits(comm: Comm, precision: str) -> Loaded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02)
    settings = {"precision": precision, "emulate_fp8": True}
    loss = lambda model, batch: (model(batch[0]).float() - batch[1]).square()  # noqa: E731
    return woven(model, adamw, comm, loss=loss, **settings), [model]


def wide(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    return x, torch.randn(16, 16, generator=generator).bfloat16()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp8", "fp8-delayed"])
def test_a_model_in_eight_bits_goes_on_to_the_bit(precision: str) -> None:
    """Scales of earlier steps are in the model's own state."""
    made = partial(in_eight_bits, precision=precision)
    at_once, engine_last, engine_first = go_on(Comm(), made, wide)
    assert len({*at_once}) == STEPS, "the losses change"
    assert at_once == engine_last == engine_first


def test_what_the_model_keeps_whole_is_saved_once() -> None:
    model = nn.Linear(5, 3).double()
    engine = woven(model, torch.optim.SGD(model.parameters(), lr=0.1), Comm(), loss=squares)
    engine.step(batch(0))
    assert engine.state_dict()["exact"] == {}


class Signum(torch.optim.Optimizer):
    """As the tutorial's: it declares two numbers, and none of PyTorch's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 1 - group["beta"])
                param.sub_(mean.sign(), alpha=group["lr"])


@pytest.mark.parametrize(
    "kind", [Signum, torch.optim.Adafactor, torch.optim.Muon], ids=lambda kind: kind.__name__
)
def test_optimizers_that_declare_little_go_on_to_the_bit(kind: Any) -> None:
    """PyTorch adds defaults of its own to those of an optimizer as it loads."""

    def made(comm: Comm) -> Loaded:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 3, bias=False)).double()
        return woven(model, kind(model.parameters()), comm, loss=squares), [model]

    at_once, engine_last, engine_first = go_on(Comm(), made, batch)
    assert len({*at_once}) == STEPS, "the losses change"
    assert at_once == engine_last == engine_first
    optimizer = kind(nn.Linear(5, 3, bias=False).parameters())
    before = dict(optimizer.defaults)
    with pytest.raises(ConfigError, match=r"state\.optimizer"):
        load_state(optimizer, {"state": {}, "param_groups": [{"params": [0]}]})
    assert optimizer.defaults == before


def test_what_another_engine_saved_is_refused() -> None:
    engine, _ = whole(Comm(), PLANS["one"])
    state = engine.state_dict()
    missing = {place: value for place, value in state["exact"].items() if "0.bias" not in place}
    before = {place: value.clone() for place, value in state["exact"].items()}
    with pytest.raises(ConfigError, match=re.escape("state.exact = '0.bias[0:9]': expected the 4")):
        engine.load_state_dict({**state, "exact": missing})
    with pytest.raises(ConfigError, match=r"state = \['state'\]: expected exact, loss_scale"):
        engine.load_state_dict({"state": {}})
    with pytest.raises(ConfigError, match=r"state.loss_scale = .*expected a scale where"):
        engine.load_state_dict({**state, "loss_scale": {"value": 2.0, "clean_steps": 0.0}})
    after = engine.state_dict()["exact"]
    assert all(torch.equal(value, after[place]) for place, value in before.items())


def test_the_scale_of_a_loss_is_saved() -> None:
    """Steps that overflow until it is small enough are not made again."""

    def half() -> tuple[nn.Linear, WovenEngine]:
        torch.manual_seed(0)
        model = nn.Linear(64, 1)
        loss = lambda model, x: (model(x.half()) - 400).float().square().squeeze(1)  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return model, weft.weave(model, optimizer, loss=loss, precision="fp16")

    x, (model, engine) = torch.rand(64, 64), half()
    skipped = 0
    engine.step(x)
    while engine.last is not None and engine.last.skipped:
        skipped += 1
        engine.step(x)
    assert skipped > 0
    saved = copy.deepcopy((model.state_dict(), engine.state_dict()))
    losses = [float(engine.step(x)) for _ in range(3)]
    model, engine = half()
    model.load_state_dict(saved[0])
    engine.load_state_dict(saved[1])
    assert [float(engine.step(x)) for _ in range(3)] == losses and len(set(losses)) == 3


def in_full(comm: Comm, plan: Plan) -> WovenEngine:
    """Nothing is rounded: the state is of the optimizer alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    loss = lambda model, batch: (model(batch) - 1).square()  # noqa: E731
    return woven(model, torch.optim.AdamW(model.parameters()), comm, loss=loss, plan=plan)


def load_the_first_ones(address: RankAddress, plan: Plan, file: Path) -> str:
    """What a rank is told that loads what rank 0 saved."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    engine = in_full(comm, plan)
    engine.step(torch.ones(4, 8))
    if engine.rank == 0:
        torch.save(engine.state_dict(), file)
    comm.barrier(name="saved")
    told = ""
    try:
        engine.load_state_dict(torch.load(file, weights_only=True))
    except ConfigError as error:
        told = str(error)
    comm.close()
    return told


@pytest.mark.parametrize(("zero", "is_one"), [(0, True), (1, False), (2, False)])
def test_another_process_s_state_is_refused_where_it_is_another(
    zero: int, is_one: bool, pool: WorkerPool, tmp_path: Path
) -> None:
    """Segments of like layers have like sizes: one process's moments fit the other's parameters."""
    plan = side_by_side((2, 4, 2), zero=zero)
    first, second = pool.run(load_the_first_ones, plan, tmp_path / "0.pt", world_size=2)
    assert not first
    assert is_one or re.match(
        r"state.places = '.\.weight\[.*expected .\.weight\[.*, of the", second
    )
    assert not (is_one and second)
