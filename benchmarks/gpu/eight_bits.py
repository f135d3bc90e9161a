"""Products in eight bits: are they what they say, and how fast beside bf16 and torchao's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.part import Found, Here, Part
from benchmarks.gpu.speed import Step, in_turns, model_of, plain_step, weft_step
from weft.parallel.fp8.linear import Factors, ScaledLinear
from weft.parallel.fp8.rounding import Spans, product, scaled
from weft.plan.plan import Precision
from weft.precision.registry import PRECISIONS

SIDES = (1024, 2048, 4096, 8192, 16384)
SMALL = (64, 128)
LARGEST_LAYER = 8192
TIMES, REPEATS = 7, 5
WITHIN = 2.0**-6
"""Of the largest result: sums in another order, and results in bf16."""
LOSSES_WITHIN = 0.02
"""Of the loss of the same steps in bf16."""
TORCHAO = "torchao.float8"


def seconds_of(here: Here, work: Callable[[], object]) -> float:
    """One of many calls in a row, the median of some rounds."""
    found = []
    for turn in range(TIMES + 2):
        here.platform.synchronize()
        begun = time.perf_counter()
        for _ in range(REPEATS):
            work()
        here.platform.synchronize()
        if turn >= 2:
            found.append((time.perf_counter() - begun) / REPEATS)
    return statistics.median(found)


def normal(here: Here, *size: int, scale: float = 1.0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(len(size) + sum(size))
    values = torch.randn(size, generator=generator, dtype=torch.float32) * scale
    return values.to(here.platform.device(0), torch.bfloat16)


def factors_of(precision: Precision, *, by_tensor_cores: bool) -> Factors:
    """How layers of a precision round what they multiply."""
    products = PRECISIONS[precision].products
    assert products is not None, f"{precision} does not multiply in eight bits"
    return Factors(products, by_tensor_cores=by_tensor_cores)


def layer_of(here: Here, side: int, precision: Precision, *, by_tensor_cores: bool) -> nn.Module:
    """A linear layer of the same weight whatever multiplies."""
    linear = nn.Linear(side, side, bias=False, device=here.platform.device(0), dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(normal(here, side, side, scale=0.02))
    return ScaledLinear(linear, factors_of(precision, by_tensor_cores=by_tensor_cores))


def three_products(here: Here, layer: nn.Module, side: int) -> dict[str, Tensor]:
    """What a layer gives, and the gradients of what came in and of its weight."""
    x = normal(here, 2, side, side).requires_grad_()
    y = layer(x)
    y.backward(normal(here, 2, side, side, scale=1e-3))
    weight = next(layer.parameters()).grad
    assert x.grad is not None and weight is not None, "a gradient is missing"
    return {"y": y.detach(), "dx": x.grad, "dw": weight}


def agrees(here: Here, found: Found) -> None:
    """Tensor cores beside the emulation; the emulation beside sums in fp64."""
    side = SMALL[1] if here.is_host else 1024
    x, w = normal(here, side, side), normal(here, side, side, scale=0.02)
    left = scaled(x, torch.float8_e4m3fn, Spans(whole=(1,)))
    right = scaled(w, torch.float8_e4m3fn, Spans(whole=(1,)))
    exact = left.exact(torch.float32).double() @ right.exact(torch.float32).double().T
    gap = _gap(product(left, right, torch.bfloat16, by_tensor_cores=False), exact)
    found.measures("emulation, largest gap to sums in fp64", gap)
    found.proves("the emulation multiplies what was rounded to", holds=gap <= WITHIN)
    if not here.platform.multiplies_fp8():
        found.measures("tensor cores in eight bits", "none: everything is emulated")
        return
    for precision in ("fp8", "fp8-rowwise", "fp8-blockwise"):
        layers = (layer_of(here, side, precision, by_tensor_cores=each) for each in (True, False))
        ours, emulated = (three_products(here, layer, side) for layer in layers)
        for name, value in ours.items():
            gap = _gap(value, emulated[name])
            found.measures(f"{precision}, {name}: largest gap to the emulation", gap)
            found.proves(f"{precision}: {name} is what is emulated", holds=gap <= WITHIN)


def _gap(found: Tensor, known: Tensor) -> float:
    largest = known.abs().max()
    return float((found.double() - known.double()).abs().max() / largest)


def table(here: Here, found: Found) -> None:
    """TFLOP/s of square products, and of whole layers forward and backward."""
    torchao = why_no_torchao(here)
    if torchao:
        found.measures("torchao", f"left out: {torchao}")
    cores = here.platform.multiplies_fp8()
    for side in SMALL if here.is_host else SIDES:
        for name, taken in product_seconds(here, side, by_tensor_cores=cores).items():
            _tell(found, f"{name}, {side}^3", 2 * side**3, taken)
        if side > LARGEST_LAYER:
            continue
        for name, taken in layer_seconds(here, side, by_tensor_cores=cores).items():
            _tell(found, f"layer of {side}, {name}, both ways", 6 * side**3, taken)


def product_seconds(here: Here, side: int, *, by_tensor_cores: bool) -> dict[str, float]:
    """Of one square product in bf16, in eight bits, and in eight bits with the rounding of both
    factors."""
    x, w = normal(here, side, side), normal(here, side, side, scale=0.02)
    whole = Spans(whole=(0, 1))
    left, right = (scaled(each, torch.float8_e4m3fn, whole) for each in (x, w))
    ways: dict[str, Callable[[], object]] = {
        "bf16": lambda: x @ w.T,
        "fp8": partial(product, left, right, torch.bfloat16, by_tensor_cores=by_tensor_cores),
        "fp8, with rounding": partial(_rounded_product, x, w, by_tensor_cores),
    }
    return {name: seconds_of(here, work) for name, work in ways.items()}


def layer_seconds(here: Here, side: int, *, by_tensor_cores: bool) -> dict[str, float]:
    """Of a layer forward and backward on as many tokens, compiled on cards; torchao's too, where
    it can be measured."""
    layers: dict[str, nn.Module] = {
        "bf16": _linear(here, side),
        "fp8": layer_of(here, side, "fp8", by_tensor_cores=by_tensor_cores),
        "fp8-rowwise": layer_of(here, side, "fp8-rowwise", by_tensor_cores=by_tensor_cores),
    }
    if not why_no_torchao(here):
        layers["torchao's float8"] = by_torchao(nn.Sequential(_linear(here, side)))
    found = {}
    for name, layer in layers.items():
        torch.compiler.reset()  # what was compiled for other sizes
        run = layer if here.is_host else torch.compile(layer, dynamic=False)
        found[name] = seconds_of(here, partial(_both_ways, here, run, side))
    return found


def _rounded_product(x: Tensor, w: Tensor, cores: bool) -> Tensor:
    whole = Spans(whole=(0, 1))
    left, right = (scaled(each, torch.float8_e4m3fn, whole) for each in (x, w))
    return product(left, right, torch.bfloat16, by_tensor_cores=cores)


def _linear(here: Here, side: int) -> nn.Linear:
    return nn.Linear(side, side, bias=False, device=here.platform.device(0), dtype=torch.bfloat16)


def _both_ways(here: Here, layer: Callable[[Tensor], Tensor], side: int) -> None:
    x = normal_once(here, side)
    layer(x).sum().backward()  # type: ignore[no-untyped-call]
    x.grad = None


_INPUTS: dict[int, Tensor] = {}


def normal_once(here: Here, side: int) -> Tensor:
    """One sample that wants a gradient; the same each time, for making it takes time."""
    if side not in _INPUTS:
        _INPUTS.clear()
        _INPUTS[side] = normal(here, 1, side, side).requires_grad_()
    return _INPUTS[side]


def _tell(found: Found, what: str, flops: float, seconds: float) -> None:
    found.measures(f"{what}, TFLOP/s", flops / seconds / 1e12)


def why_no_torchao(here: Here) -> str:
    """One sentence; empty where it can be measured too."""
    if find_spec(TORCHAO.partition(".")[0]) is None:
        return "the package torchao is not installed"
    if not here.platform.multiplies_fp8():
        return "no tensor cores in eight bits"
    try:
        __import__(TORCHAO)
    except ImportError as error:
        return f"torchao cannot be imported: {error}"
    return ""


def by_torchao(model: nn.Module) -> nn.Module:
    """Its linear layers converted as its documentation says, in place, with scales of tensors."""
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

    made: nn.Module = convert_to_float8_training(
        model, module_filter_fn=lambda _, name: "head" not in name
    )
    return made


def steps(here: Here, found: Found) -> None:
    """Steps of a slice of an 8B model in bf16 and in eight bits: losses, and tokens a second."""
    work = model_of(here, "8b")
    vocab = work.spec.vocab_size
    compiled: dict[str, Any] = {} if here.is_host else {"compile": True}
    makers: dict[str, Callable[[], Step]] = {
        f"Weft, {precision}": partial(weft_step, here, work, **compiled, precision=precision)
        for precision in ("bf16", "fp8", "fp8-rowwise", "fp8-delayed")
    }
    if not why_no_torchao(here):
        makers["plain PyTorch with torchao's float8, compiled"] = partial(
            plain_step, here, work, change=by_torchao
        )
    medians, losses = {}, {}
    for who, make in makers.items():  # two do not fit side by side
        step = make()
        torch.manual_seed(0)
        tokens = torch.randint(0, vocab, (work.samples, work.seq_len + 1)).to(
            here.platform.device(0)
        )
        losses[who] = [float(step(tokens)) for _ in range(4)]  # type: ignore[arg-type]
        taken = in_turns(here, {who: step}, vocab, work.shape)[who]
        medians[who] = statistics.median(taken)
        found.measures(f"{who}, tokens/s", work.samples * work.seq_len / medians[who])
        del step
        gc.collect()  # hooks of parameters lead back to their model
    first, *others = (who for who in makers if who.startswith("Weft"))
    for who in others:
        gap = max(abs(a / b - 1) for a, b in zip(losses[who], losses[first], strict=True))
        found.measures(f"{who}, loss of 4 steps on one batch beside bf16", f"{gap:.2%}")
        found.proves(f"{who} trains as bf16 does", holds=gap <= LOSSES_WITHIN)
        found.measures(f"{who}, times as fast as bf16", medians[first] / medians[who])


def eight_bits(here: Here, found: Found) -> None:
    """All three questions; what comes first is worth most."""
    agrees(here, found)
    steps(here, found)
    table(here, found)


PARTS = (
    Part(name="fp8", asks="products in eight bits: right, and faster than bf16?", run=eight_bits,
         minutes=8),
)  # fmt: skip
