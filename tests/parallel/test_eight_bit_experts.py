"""Experts that multiply in eight bits."""

from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from parallel.alone import Alone
from torch import Tensor

from weft.cost.operators import Op
from weft.cost.rates import Roofline, compute_seconds
from weft.cost.work import StageWork
from weft.models.shape import ExpertShape, ModelShape
from weft.nn.experts.feed_forward import Expert
from weft.nn.experts.grouped import grouped_product, grouped_weight_grad
from weft.parallel.fp8.apply import EightBits
from weft.parallel.fp8.experts import ScaledExpert
from weft.parallel.fp8.linear import Factors
from weft.parallel.runtime import AxisGroup
from weft.precision.roles import Products, Scaling

SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
ENDS = torch.tensor([5, 5, 12, 19], dtype=torch.int32)
"""The second has no rows."""


def layer(scaling: Scaling, dtype: torch.dtype = torch.float64, **facts: Any) -> ScaledExpert:
    torch.manual_seed(1)
    expert = Expert(4, 48, 32).to(dtype)
    torch.nn.init.normal_(expert.weight)
    return ScaledExpert(expert, Factors(Products(scaling=scaling, block=16), **facts))


def grads(module: ScaledExpert, x: Tensor, g: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    x, module.weight.grad = x.clone().requires_grad_(), None
    y = module(x, ends)
    y.backward(g)
    assert x.grad is not None and module.weight.grad is not None
    return y.detach(), x.grad, module.weight.grad


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_rounded_factors(scaling: Scaling) -> None:
    """Each is that of factors rounded beforehand; near the exact one, and not the exact one."""
    module, x, g = layer(scaling), torch.randn(19, 48).double(), torch.randn(19, 32).double()
    y, d_x, d_w = grads(module, x, g, ENDS)
    factors, w = module._factors, module.weight.detach()
    x8 = factors.row(x, is_gradient=False).exact(x.dtype)
    g8 = factors.row(g, is_gradient=True).exact(x.dtype)
    assert torch.equal(y, grouped_product(x8, factors.matrices(w, 2).exact(x.dtype), ENDS))
    turned = factors.matrices(w, 1).exact(x.dtype)
    begin = 0
    for expert, end in enumerate(ENDS.tolist()):
        rows = slice(begin, end)
        assert torch.allclose(d_x[rows], g8[rows] @ turned[expert])
        assert torch.allclose(d_w[expert], g8[rows].T @ x8[rows])
        exact = (x[rows] @ w[expert].T, g[rows] @ w[expert], g[rows].T @ x[rows])
        for found, value in zip((y[rows], d_x[rows], d_w[expert]), exact, strict=True):
            if end > begin:
                assert 1e-3 < (found - value).norm() / value.norm() < 0.1
        begin = end
    assert not d_w[1].any()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rows_and_experts_do_not_know_of_each_other(scaling: Scaling) -> None:
    module = layer(scaling)
    x = torch.randn(19, 48).double() * torch.logspace(-6, 6, 19).double()[:, None]
    g = torch.randn(19, 32).double()
    whole = grads(module, x, g, ENDS)
    few = torch.tensor([0, 0, 7, 7], dtype=torch.int32)
    alone = grads(module, x[5:12], g[5:12], few)
    assert torch.equal(alone[0], whole[0][5:12]) and torch.equal(alone[1], whole[1][5:12])
    assert torch.equal(alone[2][2], whole[2][2]) and not alone[2][3].any()
    none = grads(module, x[:0], g[:0], torch.zeros_like(ENDS))
    assert [*none[0].shape] == [0, 32] and not none[2].any()


def test_what_is_no_number_stays_with_its_row() -> None:
    module, x = layer("tensorwise"), torch.randn(19, 48).double()
    x[3, 7], x[8] = float("inf"), 0.0
    y = module(x, ENDS)
    assert y[3].isnan().all() and y[8].eq(0).all() and y.isnan().sum() == 32


def test_half_the_bytes_wait_for_backward() -> None:
    module, kept = layer("tensorwise", torch.bfloat16), []

    def pack(x: Tensor) -> Tensor:
        if x.shape == (19, 48):
            kept.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(torch.randn(19, 48).bfloat16(), ENDS)
    assert kept == [19 * 48]


@pytest.mark.parametrize("rows", [16, 19])
@pytest.mark.parametrize("width", [24, 28])
def test_weight_gradients_of_any_width(rows: int, width: int) -> None:
    """PyTorch's own product wants features of whole 16 bytes, and any number of rows."""
    ends = torch.tensor([5, 5, rows], dtype=torch.int32)
    grad, x = torch.randn(rows, 32).bfloat16(), torch.randn(rows, width).bfloat16()
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as own:
        found = grouped_weight_grad(grad, x, ends)
    assert own.called == (width == 24)
    for expert, each in enumerate((slice(0, 5), slice(0, 0), slice(5, rows))):
        exact = grad[each].double().T @ x[each].double()
        assert torch.allclose(found[expert].double(), exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_pytorchs_own_product(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given rows, columns and scales as it is documented to take them, and one scale for
    each."""
    calls = 0

    refusing = torch._scaled_grouped_mm

    def of_a_card(
        rows: Tensor, columns: Tensor, of_rows: Tensor, of_columns: Tensor, **more: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        assert rows.is_contiguous() and columns.mT.is_contiguous()
        assert of_rows.shape == rows.shape[:1] and of_rows.is_contiguous()
        assert of_columns.shape == (4, columns.shape[2]) and of_columns.is_contiguous()
        assert more["offs"].dtype == torch.int32 and more["out_dtype"] == torch.bfloat16
        given = (each.to("meta") for each in (rows, columns, of_rows, of_columns))
        refusing(*given, offs=more["offs"].to("meta"), out_dtype=torch.bfloat16)
        left, right = rows.float() * of_rows[:, None], columns.float() * of_columns[:, None]
        return grouped_product(left, right.mT, more["offs"]).bfloat16()

    monkeypatch.setattr(torch, "_scaled_grouped_mm", of_a_card)
    x, g = torch.randn(19, 48).bfloat16(), torch.randn(19, 32).bfloat16()
    found = grads(layer(scaling, torch.bfloat16, by_tensor_cores=True), x, g, ENDS)
    assert calls == 2, "weight gradients are in 16 bits"
    for ours, theirs in zip(found, grads(layer(scaling, torch.bfloat16), x, g, ENDS), strict=True):
        assert (ours - theirs).float().norm() < 1e-2 * theirs.float().norm()


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_talks_each_time() -> None:
    comm = Alone()
    groups = (AxisGroup(comm, (0, 1)),)  # type: ignore[arg-type]
    module = layer("tensorwise", divided=(True, False), groups=groups)
    x, g = torch.randn(19, 48).double(), torch.randn(19, 32).double()
    plain = grads(module, x, g, ENDS)
    assert comm.calls == 3, "the weight twice, and the gradient of what it gives"
    compiled = torch.compile(lambda x, ends: module(x, ends) + 0, backend="eager")
    for times in (2, 3):
        module.weight.grad = None
        leaf = x.clone().requires_grad_()
        y = compiled(leaf, ENDS)
        y.backward(g)
        assert comm.calls == 3 * times
        assert all(map(torch.equal, (y, leaf.grad, module.weight.grad), plain))


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_takes_other_numbers_of_rows() -> None:
    """PyTorch 2.11 could not compile them for any number."""
    plain = layer("blockwise", torch.bfloat16)
    module = ScaledExpert(plain, Factors(Products(scaling="blockwise")))  # type: ignore[arg-type]
    compiled = torch.compile(module, dynamic=True)
    for rows in (19, 23, 31):
        ends = torch.tensor([5, 5, 12, rows], dtype=torch.int32)
        x, g = torch.randn(rows, 48).bfloat16(), torch.randn(rows, 32).bfloat16()
        known = grads(module, x, g, ends)
        for ours, theirs in zip(grads(compiled, x, g, ends), known, strict=True):  # type: ignore[arg-type]
            assert (ours - theirs).float().norm() < 1e-2 * theirs.float().norm()


def test_those_that_are_left_out_have_16_bits() -> None:
    eight = EightBits.__new__(EightBits)
    one, other = Expert(2, 4, 4), Expert(2, 4, 4)
    spec = SimpleNamespace(name="other", fp8=False)
    eight._made, eight._names = {}, {}
    eight._params = {id(other.weight): SimpleNamespace(spec=spec)}  # type: ignore[dict-item]
    eight._groups, eight._token_groups, eight._histories = [], [], None
    eight._products, eight._by_tensor_cores = Products(scaling="tensorwise"), {Expert: False}
    eight._fused = False
    made = eight.apply(torch.nn.ModuleList([one, other]))
    assert [type(each) for each in made.children()] == [ScaledExpert, Expert]


def test_predicted_as_they_are_computed() -> None:
    """Of Weft's three products of an expert one is in 16 bits; others have all in eight."""
    rates = dict.fromkeys(("flops_s", "fp32_flops_s", "attention_flops_s"), 1e12)
    chip = Roofline(fp8_flops_s=2e12, bytes_s=1e30, launch_s=0.0, **rates)
    shape = ModelShape(
        num_layers=1, d_model=64, d_ff=64, num_heads=0, num_kv_heads=0, d_head=0, vocab_size=8,
        gated=True, experts=ExpertShape(num_experts=4, top_k=2, d_ff=64),
    )  # fmt: skip
    work = StageWork(layers=(0, 1), embeds=False, predicts=0.0, samples=1, seq_len=64, dtype="fp8")
    ours = compute_seconds(shape, work._replace(in_chunks=True), chip).weight_grad_s
    theirs = compute_seconds(shape, work, chip).weight_grad_s
    router = Op("router", "matmul", 64, 4, 64)
    narrow = chip.seconds(router, "weight_grad", "fp8")
    assert ours - narrow == pytest.approx(2 * (theirs - narrow))
