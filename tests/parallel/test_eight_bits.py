"""Numbers in eight bits: what they are rounded to, and linear layers that multiply them."""

import math
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.alone import Alone
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.parallel.fp8.apply import EightBits
from weft.parallel.fp8.fused import contiguous
from weft.parallel.fp8.history import STREAM, Histories, histories_of
from weft.parallel.fp8.linear import FEATURES, Factors, ScaledLinear
from weft.parallel.fp8.rounding import Scaled, Spans, product, scale_for, scaled
from weft.parallel.pipeline.deferred import WeightWork
from weft.parallel.runtime import AxisGroup
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.platform.registry import PLATFORMS
from weft.precision.roles import Products, Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


def multiplies_by_rows() -> bool:
    """A processor can, with a scale for each row: PyTorch 2.11's takes one for all."""
    eight, scales = torch.ones(16, 16).to(E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(eight, eight.T, scales, scales.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


BY_ROWS = pytest.mark.skipif(
    not multiplies_by_rows(), reason="this PyTorch's processors take one scale for a matrix"
)


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from([E4M3, E5M2]))
def test_the_largest_is_near_the_largest_that_there_is(value: float, dtype: torch.dtype) -> None:
    largest = torch.tensor(value)
    scale = scale_for(largest, dtype)
    assert torch.frexp(scale)[0] == 0.5, "a power of two"
    assert largest * scale <= torch.finfo(dtype).max < 2 * largest * scale


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 1e-45, 3e38])
def test_what_has_no_scale(value: float) -> None:
    x = torch.tensor([[value, 0.0], [1.0, -2.0]])
    found = scaled(x, E4M3, Spans(whole=(1,))).exact(torch.float32)
    assert found[1].tolist() == [1.0, -2.0]
    if x.isfinite().all():
        assert found[0].tolist() == pytest.approx([value, 0.0], rel=2**-4, abs=1e-42)
    else:
        assert found[0].isnan().all(), "eight bits would make 448 of infinity"


def test_each_span_has_its_scale() -> None:
    x = torch.randn(2, 5, 300) * torch.logspace(-6, 6, 300)
    spans = {(): 1, (1,): 2 * 300, (2,): 2 * 5, (1, 2): 2}
    for whole, many in spans.items():
        found = scaled(x, E4M3, Spans(whole=whole))
        assert found.scale.numel() == (x.numel() if not whole else many)
    blocks = scaled(x, E4M3, Spans(blocks=(2,)), block=128)
    for low in range(0, 300, 128):
        part = x[..., low : low + 128]
        alone = scaled(part, E4M3, Spans(whole=(2,)))
        assert torch.equal(blocks.exact(x.dtype)[..., low : low + 128], alone.exact(x.dtype))
    half_of_the_smallest = 2.0**-10 / blocks.scale
    assert ((blocks.exact(x.dtype) - x).abs() <= x.abs() * 2**-4 + half_of_the_smallest).all()


def layer(scaling: Scaling, dtype: torch.dtype = torch.float64, **facts: object) -> ScaledLinear:
    torch.manual_seed(1)
    factors = Factors(Products(scaling=scaling, block=16), **facts)  # type: ignore[arg-type]
    return ScaledLinear(nn.Linear(48, 32, dtype=dtype), factors)


def grads(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g)
    assert x.grad is not None
    found = [y.detach(), x.grad]
    for param in module.parameters():
        assert param.grad is not None
        found.append(param.grad)
        param.grad = None
    return tuple(found)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_rounded_factors(scaling: Scaling) -> None:
    """Each is that of factors rounded beforehand; near the exact one, and not the exact one."""
    module, x, g = layer(scaling), torch.randn(3, 20, 48).double(), torch.randn(3, 20, 32).double()
    y, d_x, d_w, d_b = grads(module, x, g)
    factors = module._factors
    w = module.weight.detach()
    x8 = factors.stream(x, 2, is_gradient=False).exact(x.dtype)
    g8 = factors.stream(g, 2, is_gradient=True).exact(x.dtype)
    assert module.bias is not None
    assert torch.equal(y, x8 @ factors.weight(w, 1).exact(x.dtype).T + module.bias)
    assert torch.equal(d_x, g8 @ factors.weight(w, 0).exact(x.dtype))
    x8 = factors.stream(x, 1, is_gradient=False).exact(x.dtype)
    g8 = factors.stream(g, 1, is_gradient=True).exact(x.dtype)
    assert torch.allclose(d_w, torch.einsum("sto,sti->oi", g8, x8), 1e-12, 1e-12)
    assert torch.allclose(d_b, g.sum((0, 1)))
    exactly = x @ w.T + module.bias, g @ w, g.flatten(0, 1).T @ x.flatten(0, 1)
    for found, exact in zip((y, d_x, d_w), exactly, strict=True):
        error = (found - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_samples_do_not_know_of_each_other(scaling: Scaling) -> None:
    """Computed at once, alone, or not at all: the same numbers to the order of sums."""
    module, scales = layer(scaling), torch.tensor([1e-6, 1.0, 1e5]).double()[:, None, None]
    x, g = torch.randn(3, 20, 48).double() * scales, torch.randn(3, 20, 32).double() / scales
    together = grads(module, x, g)
    alone = [grads(module, x[n : n + 1], g[n : n + 1]) for n in range(3)]
    for number in range(2):
        assert torch.equal(together[number], torch.cat([each[number] for each in alone]))
    for number in range(2, 4):
        assert torch.allclose(together[number], sum(each[number] for each in alone), 1e-12)  # type: ignore[arg-type]
    none = grads(module, x[:0], g[:0])
    assert [*none[0].shape] == [0, 20, 32] and not none[2].any()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_weight_gradients_may_wait(scaling: Scaling) -> None:
    module, x, g = layer(scaling), torch.randn(2, 7, 48).double(), torch.randn(2, 7, 32).double()
    at_once = grads(module, x, g)
    work = WeightWork()
    module.defer(work)
    work.is_deferring = True
    y = module(x)
    y.backward(g)
    assert module.weight.grad is None
    jobs = dict(work.take())
    assert torch.equal(jobs[module.weight](), at_once[2])
    assert module.bias is not None and torch.equal(jobs[module.bias](), at_once[3])


@BY_ROWS
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_pytorchs_own_product(scaling: Scaling) -> None:
    """The same factors, and a whole matrix of results: an older form of PyTorch gave a tuple,
    whose first is now a row."""
    plain, cores = (
        layer(scaling, torch.bfloat16),
        layer(scaling, torch.bfloat16, by_tensor_cores=True),
    )
    x, g = torch.randn(3, 32, 48).bfloat16(), torch.randn(3, 32, 32).bfloat16()
    calls = 0
    real = torch._scaled_mm

    def counted(*args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        made = real(*args, **kwargs)  # type: ignore[arg-type]
        assert isinstance(made, Tensor)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", counted)
        found = grads(cores, x, g)
    assert calls == 2 + 3, "forward, input gradients, weight gradients of each sample"
    for ours, theirs in zip(found, grads(plain, x, g), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).float().norm() < 1e-2 * theirs.float().norm()


def test_scales_of_earlier_steps() -> None:
    """They are of the largest of all that count. What then is larger is cut off, what is not finite
    is no number and does not count, nor does what evaluations see."""
    usual, wide = (Histories(["one"], 2, Comm(), margin=margin) for margin in (0, 3))
    assert usual.of("other") is None

    def rounded(value: float, histories: Histories = usual) -> tuple[float, float]:
        x, spans = torch.full((1, 2, 2), value), Spans(whole=(1, 2))
        history = histories.of("one")
        assert history is not None
        found = history.scaled(STREAM, x, E4M3, spans, combine=None, fused=False)
        return float(found.scale), float(found.exact(torch.float32)[0, 0, 0])

    def step(*samples: float) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []

        def passes(batch: tuple[float, ...]) -> Tensor:
            found.extend(map(rounded, batch))
            return torch.zeros(2)

        usual.observing(passes)(samples)
        wide.observing(lambda batch: [rounded(each, wide) for each in batch] and torch.zeros(2))(
            samples
        )
        return found

    assert step(1.0, 0.25) == [(256, 1.0), (1024, 0.25)], "the first step: each its own"
    assert step(4.0, 1.0) == [(256, 448 / 256), (256, 1.0)]
    rounded(1e6)
    (_, none), half = step(float("inf"), 0.5)
    assert isnan(none) and half == (64, 0.5), "of 4, the larger of the last two"
    assert step(0.0) == [(64, 0.0)]
    assert rounded(1.0, wide)[0] == 256, "only zeros, as many steps as count"
    assert step(3.0, 0.25) == [(128, 3.0), (1024, 0.25)], "each its own again"
    assert step(3.0) == [(128, 3.0)]
    assert rounded(1.0, wide)[0] == 16


def test_histories_are_of_layers_that_have_such_scales() -> None:
    """Another stage that gets them later begins anew; its layers never were nothing but zeros."""
    spec = replace(SIZES["debug-1m"], num_layers=4)
    stages = [
        StagePlan(mesh=Mesh.of((0,)), layers=layers, device="cpu", precision=precision)  # type: ignore[arg-type]
        for layers, precision in (((0, 1.5), "fp64"), ((1.5, 4), "fp8-delayed-fp64"))
    ]
    pipeline = PipelinePlan(stages=tuple(stages), samples=1, microbatch=1)
    plan = Plan(num_layers=4, pipelines=(pipeline,))
    histories = histories_of(plan, param_specs(spec), Comm())
    found = [histories.of(f"layers.{layer}.ff.up.weight") is not None for layer in range(4)]
    assert found == [False, True, True, True]


@BY_ROWS
def test_a_layer_has_three_histories() -> None:
    """Of what comes in, of its weight, of gradients; what has one scale is one product."""
    histories = Histories(["one"], 1, Comm())
    module = layer("delayed", torch.bfloat16, history=histories.of("one"), by_tensor_cores=True)
    x, g = torch.randn(3, 32, 48).bfloat16(), 1e-3 * torch.randn(3, 32, 32).bfloat16()
    histories.observing(lambda _: grads(module, x, g)[0])(None)
    largest = [float(each.abs().max()) for each in (x, module.weight.detach(), g)]
    assert histories.expected[0].tolist() == largest
    found, factors = grads(module, x, g), module._factors
    x8, g8 = (
        factors.stream(each, FEATURES, is_gradient=each is g).exact(torch.float64).flatten(0, 1)
        for each in (x, g)
    )
    w8 = factors.weight(module.weight, 1).exact(torch.float64)
    assert module.bias is not None
    exact = x8 @ w8.T + module.bias.double(), g8 @ w8, g8.T @ x8
    for ours, theirs in zip(found, exact, strict=False):
        assert (ours.flatten(0, -2) - theirs).norm() < 5e-3 * theirs.norm()


@BY_ROWS
def test_sums_over_samples_round_once() -> None:
    """By tensor cores each sample's term is one of bf16; their sum is not, until its end."""
    module = layer("tensorwise", torch.bfloat16, by_tensor_cores=True)
    x, g = torch.randn(64, 16, 48).bfloat16(), torch.randn(64, 16, 32).bfloat16()
    x8, g8 = (
        module._factors.stream(part, 2, is_gradient=number > 0).exact(torch.float64)
        for number, part in enumerate((x, g))
    )
    exact = g8.flatten(0, 1).T @ x8.flatten(0, 1)
    found = grads(module, x, g)[2].double()
    assert (found - exact).norm() < 3e-3 * exact.norm()


def eight_bits() -> EightBits:
    """Of a rank alone."""
    eight = EightBits.__new__(EightBits)
    eight._made, eight._params, eight._names = {}, {}, {}
    eight._groups, eight._token_groups = [], []
    eight._histories = None
    eight._products = Products(scaling="tensorwise")
    eight._by_tensor_cores, eight._fused = {torch.nn.Linear: False}, False
    return eight


def test_a_layer_that_is_gone_is_not_taken_for_one_that_comes_where_it_was() -> None:
    eight = eight_bits()
    for width in range(1, 100):  # stages are divided one after the other, and layers made for it
        model = eight.apply(nn.Sequential(nn.Linear(4, width)))
        assert [*model(torch.randn(4)).shape] == [width]


def test_layers_that_are_replaced() -> None:
    """One under two names is replaced in both, by one that has all that it had."""
    eight = eight_bits()
    shared = nn.Linear(4, 4)
    shared.register_buffer("mask", torch.ones(4))
    vars(shared)["scale"] = 3.0
    model = eight.apply(nn.Sequential(shared, nn.ReLU(), shared))
    assert isinstance(model, nn.Sequential) and model[0] is model[2]
    assert type(model[0]) is ScaledLinear and model[0].weight is shared.weight
    assert isinstance(model[0], nn.Linear) and model[0].scale == 3.0
    model.double()
    assert model[0].mask is shared.mask and shared.mask.dtype == torch.float64
    model.float()
    assert [*model(torch.randn(4)).shape] == [4], "features alone, as a linear layer takes them"


def computed(linear: nn.Linear) -> None:
    del linear.weight
    linear.weight = torch.zeros(4, 4)  # type: ignore[assignment]


def patched(linear: nn.Linear) -> None:
    linear.forward = torch.abs  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda linear: linear.register_forward_hook(print), "hooks"),
        (lambda linear: linear.register_forward_pre_hook(print), "hooks"),
        (lambda linear: linear.register_full_backward_hook(print), "hooks"),
        (lambda linear: linear.register_full_backward_pre_hook(print), "hooks"),
        (lambda linear: linear.register_state_dict_pre_hook(print), "hooks"),
        (patched, "a forward of its own"),
        (computed, "a weight or a bias that is computed"),
    ],
)
def test_layers_that_are_more_than_a_product(
    change: Callable[[nn.Linear], object], words: str
) -> None:
    """What they do besides would be passed over in silence."""
    linear = nn.Linear(4, 4)
    change(linear)
    with pytest.raises(ConfigError, match=f"precision = 'Linear.*, with {words}': .* with fp8"):
        eight_bits().apply(nn.Sequential(linear))


def test_sizes_that_tensor_cores_do_not_take() -> None:
    left, right = (Scaled(torch.randn(n, 40).to(E4M3), torch.ones(1, 1)) for n in (3, 17))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch, "_scaled_mm")
        made = product(left, right, torch.bfloat16, by_tensor_cores=True)
        like = Scaled(torch.randn(32, 32).to(E4M3), torch.ones(1, 1))
        product(like, like, torch.float64, by_tensor_cores=True)  # no card gives such results
    assert torch.equal(made, left.exact(torch.bfloat16) @ right.exact(torch.bfloat16).T)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_talks_each_time() -> None:
    comm = Alone()
    groups = (AxisGroup(comm, (0, 1)),)  # type: ignore[arg-type]
    module = layer("tensorwise", divided=(True, False), groups=groups)
    x, g = torch.randn(2, 7, 48).double(), torch.randn(2, 7, 32).double()
    plain = grads(module, x, g)
    assert comm.calls == 3, "the weight twice, and the gradient of what it gives"
    compiled = torch.compile(nn.Sequential(module, nn.Identity()), backend="eager")
    for times in (2, 3):
        found = grads(compiled, x, g)  # type: ignore[arg-type]
        assert comm.calls == 3 * times
        assert all(map(torch.equal, found, plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_compiled_code_takes_samples_of_other_lengths(scaling: Scaling) -> None:
    """PyTorch 2.11 could not compile them for any length."""
    module = layer(scaling, torch.bfloat16, by_tensor_cores=scaling == "tensorwise")
    compiled = torch.compile(module, backend="eager", dynamic=True)
    for tokens in (16, 32, 48):
        x, g = torch.randn(1, tokens, 48).bfloat16(), torch.randn(1, tokens, 32).bfloat16()
        known = grads(module, x, g)
        assert all(map(torch.equal, grads(compiled, x, g), known))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "delayed"])
def test_compiled_passes_round_to_the_same_bits(scaling: Scaling) -> None:
    """Of one sample and of several, of numbers that are none and that no scale was made for."""
    histories = [Histories(["one"], 1, Comm()) for _ in range(2)]
    plain, fused = (
        layer(scaling, torch.bfloat16, history=each.of("one") if scaling == "delayed" else None)
        for each in histories
    )
    fused._factors = replace(fused._factors, fused=True)
    for samples in (1, 3, 2):
        x, g = torch.randn(samples, 32, 48).bfloat16(), torch.randn(samples, 32, 32).bfloat16()
        x[0, 0, 0] = 1e3 * samples if samples < 3 else math.inf
        found = []
        for module, each in zip((plain, fused), histories, strict=True):
            each.observing(lambda _, of=module: found.append(grads(of, x, g)) or x)(None)  # noqa: B023
        same = [
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*found, strict=True)
        ]
        assert all(same) and found[0][0].isnan().any() == (samples == 3)


@pytest.mark.filterwarnings("ignore")
def test_compiled_passes_turn_bytes() -> None:
    x = torch.randn(40, 24).to(E4M3)
    for values in (x, x.T, x[:, 3:9].T):
        turned = contiguous(values)
        assert turned.is_contiguous()
        assert torch.equal(turned.view(torch.uint8), values.contiguous().view(torch.uint8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1, 8])
def test_what_compiled_blocks_do_not_look_into_rounds_by_compiled_passes(limit: int) -> None:
    """However many kinds of samples there are: past its limit PyTorch compiles no more blocks."""
    groups = (AxisGroup(Alone(), (0, 1)),)  # type: ignore[arg-type]
    divided = {"divided": (True, False), "groups": groups}
    module = layer("tensorwise", torch.bfloat16, by_tensor_cores=True, fused=True, **divided)
    asked: list[str] = []

    def compiled(work: Callable[..., Tensor], *given: object) -> Tensor:
        asked.append(work.__name__)
        return work(*given)

    with (
        patch("weft.parallel.fp8.rounding.compiled", compiled),
        patch("weft.parallel.fp8.fused.compiled", compiled),
        torch._dynamo.config.patch(recompile_limit=limit),
    ):
        block = torch.compile(nn.Sequential(module, nn.Identity()), backend="eager", dynamic=False)
        for tokens in (32, 48, 64):
            asked.clear()
            x, g = torch.randn(1, tokens, 48).bfloat16(), torch.randn(1, tokens, 32).bfloat16()
            grads(block, x, g)  # type: ignore[arg-type]
            assert sorted(set(asked)) == ["_largest", "_times", "_turned", "scale_for"]
            assert asked.count("_turned") == 3, "the weight, and both factors of its gradient"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_blocks_have_delayed_scales_within(backend: str) -> None:
    """One program for all layers, while their histories fill and when they are full; it takes note
    of the same largest magnitudes, also where backwards come after several forwards."""
    torch._dynamo.reset()
    plain, compiled = (Histories(["one", "two"], 2, Comm()) for _ in range(2))
    blocks = [
        nn.Sequential(layer("delayed", torch.bfloat16, history=each.of(name)))
        for each in (plain, compiled)
        for name in ("one", "two")
    ]
    for block in blocks[2:]:
        block.compile(backend=backend, fullgraph=True)
    programs = torch._dynamo.utils.counters["stats"]
    programs.clear()

    def passes(pair: list[nn.Sequential]) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in samples for _ in pair]
        made = [block(leaf) for block, leaf in zip(pair * len(samples), leaves, strict=True)]
        for number, y in enumerate(made):
            y.backward(g * (1 + number))
        found.append([leaf.grad for leaf in leaves] + [b[0].weight.grad.clone() for b in pair])
        found[-1] += made
        return torch.zeros(2)

    for step in range(4):
        samples = [3.0 ** (step % 3) * torch.randn(2, 32, 48).bfloat16() for _ in range(2)]
        g, found = torch.randn(2, 32, 32).bfloat16(), []
        plain.observing(passes)(blocks[:2])
        compiled.observing(passes)(blocks[2:])
        assert all(map(torch.equal, *found))
        assert torch.equal(plain.expected, compiled.expected)
        for block in blocks:
            block.zero_grad()
    assert programs["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_not_given_compiled_passes() -> None:
    plain, module = (layer("tensorwise", torch.bfloat16, fused=each) for each in (False, True))
    x, g = torch.randn(1, 32, 48).bfloat16(), torch.randn(1, 32, 32).bfloat16()
    with patch("weft.parallel.fp8.rounding.compiled", side_effect=AssertionError):
        block = torch.compile(module, backend="eager")
        found = grads(block, x, g)  # type: ignore[arg-type]
    assert all(map(torch.equal, found, grads(plain, x, g)))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_passes_are_compiled_where_blocks_are_and_round_to_the_same_bits(
    asked: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that does not compile has no compiler in it, and older cards' cuts bits off."""
    monkeypatch.setattr(type(PLATFORMS["cpu"]), "compiles_fp8", lambda _: compiles)
    stage = StagePlan(
        mesh=Mesh.of((0,)), layers=(0, 1), device="cpu", precision="fp8-delayed", compile=asked
    )
    pipeline = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    plan = Plan(num_layers=1, pipelines=(pipeline,)).rank_plan(0)
    made = EightBits(Products(scaling="delayed"), [], plan, Comm()).apply(nn.Linear(4, 4))
    assert isinstance(made, ScaledLinear) and made._factors.fused == (asked and compiles)


def test_scales_that_an_inference_made_serve_the_next_step() -> None:
    histories = Histories(["one"], 1, Comm())
    module = layer("delayed", torch.bfloat16, history=histories.of("one"))
    x, g = torch.randn(1, 32, 48).bfloat16(), torch.randn(1, 32, 32).bfloat16()
    for _ in range(2):
        histories.observing(lambda _: grads(module, x, g)[0])(None)
        with torch.inference_mode():
            module(x)
