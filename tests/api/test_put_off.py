"""Layers whose weight gradients are put off: the numbers are those of a whole backward."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.api.engine import WovenEngine
from weft.api.weave_layers import build_layers
from weft.comm.comm import Comm

WIDTH = 6
BATCH = (
    torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)),
    torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)),
)


class Inner(nn.Module):
    """A linear layer, to which ``change`` does something, and how ``use`` computes with it."""

    def __init__(
        self, change: Callable[[nn.Linear], object], use: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.vector = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self._use = use
        change(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self._use(self, x).tanh() * self.vector


def usual(module: Any, x: Tensor) -> Tensor:
    result: Tensor = module.inner(x)
    return result


def with_other_values(module: Any, x: Tensor) -> Tensor:
    values = {name: param.tanh() for name, param in module.inner.named_parameters()}
    return torch.func.functional_call(module.inner, values, (x,))


def by_class(module: Any, x: Tensor) -> Tensor:
    is_linear = isinstance(module.inner, nn.Linear) and type(module.inner) is nn.Linear
    return usual(module, x) * (0.5 if is_linear else 1.0)


def of_a_vector(module: Any, x: Tensor) -> Tensor:
    return x * usual(module, module.vector)


def downhill(module: Any, x: Tensor) -> Tensor:
    """Computes with a gradient of its own."""
    with torch.enable_grad():
        start = x if x.requires_grad else x.clone().requires_grad_()
        energy = usual(module, start).square().sum()
        (slope,) = torch.autograd.grad(energy, start, create_graph=True)
    return usual(module, x - 0.1 * slope)


def by_weight(module: Any, x: Tensor) -> Tensor:
    """Asks for a gradient that other backward passes put off."""
    with torch.enable_grad():
        energy = usual(module, x.detach()).square().sum()
        (slope,) = torch.autograd.grad(energy, module.inner.weight)
    return usual(module, x) * slope.norm()


def in_half(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return usual(module, x).to(x.dtype)


def patch(linear: nn.Linear) -> None:
    given = linear.forward
    linear.forward = lambda x: 2 * given(x)  # type: ignore[method-assign, assignment, misc]


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def nothing(_linear: nn.Linear) -> None:
    """It stays as it is."""


CASES: dict[str, tuple[Callable[[nn.Linear], object], Callable[[Any, Tensor], Tensor]]] = {
    "plain": (nothing, usual),
    "other values": (nothing, with_other_values),
    "class": (nothing, by_class),
    "vector": (nothing, of_a_vector),
    "second derivative": (nothing, downhill),
    "own gradient": (nothing, by_weight),
    "autocast": (nothing, in_half),
    "forward": (patch, usual),
    "backward hook": (
        lambda m: m.register_full_backward_hook(lambda _m, given, _got: (given[0] * 0.1,)),
        usual,
    ),
    "backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(lambda _m, got: (got[0] * 0.5,)),
        usual,
    ),
    "hook of the weight": (lambda m: m.weight.register_hook(lambda grad: 2 * grad), usual),
    "late hook of the bias": (lambda m: m.bias.register_post_accumulate_grad_hook(halve), usual),
    "buffer": (
        lambda m: m.register_buffer("mask", torch.full((WIDTH,), 0.5)),
        lambda module, x: usual(module, x) * module.inner.mask,
    ),
    "attribute": (
        lambda m: vars(m).update(scale=3.0),
        lambda module, x: usual(module, x) * module.inner.scale,
    ),
}


def engine_of(case: str, schedule: Any, **settings: Any) -> WovenEngine:
    layers = [
        weft.Layer(nn.Linear, WIDTH, WIDTH),
        weft.Layer(Inner, *CASES[case]),
        weft.Layer(nn.Linear, WIDTH, WIDTH),
    ]
    plan = weft.split(layers, samples=8, microbatch=4, meshes=1, schedule=schedule, **settings)
    make = partial(torch.optim.SGD, lr=0.5)
    return build_layers(layers, make, Comm(), loss=squares, plan=plan, seed=1)


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def losses(case: str, schedule: Any, **settings: Any) -> list[float]:
    engine = engine_of(case, schedule, **settings)
    return [float(engine.step(BATCH)) for _ in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_a_linear_layer_does_what_it_did(case: str) -> None:
    """Whatever its owner has given it, and whatever computes with it."""
    whole = losses(case, "1f1b")
    for schedule in ("zb-h1", "zb-v"):
        assert losses(case, schedule) == pytest.approx(whole, rel=1e-5)
    assert case == "plain" or whole != pytest.approx(losses("plain", "1f1b"), rel=1e-5)


def test_a_second_derivative_that_is_computed_again() -> None:
    case, again = "second derivative", {"recompute": "full"}
    assert losses(case, "zb-h1", **again) == pytest.approx(losses(case, "1f1b"), rel=1e-5)


def test_other_values_in_eight_bits() -> None:
    case, eight = "other values", {"precision": "fp8"}
    assert losses(case, "zb-h1", **eight) == pytest.approx(losses(case, "1f1b", **eight), rel=1e-5)


def test_a_copy_of_a_layer_computes_with_its_own_weights() -> None:
    engine = engine_of("plain", "zb-h1")
    copied = copy.deepcopy(engine.layers[1])
    x = BATCH[0]
    before = copied(x)
    engine.step(BATCH)
    assert torch.equal(copied(x), before) and not torch.equal(engine.layers[1](x), before)
