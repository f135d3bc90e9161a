"""The layer of experts by itself, against sums written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.errors import ConfigError
from weft.nn.experts.feed_forward import Experts
from weft.nn.experts.grouped import by_expert, grouped_product, one_by_one, spread, together
from weft.plan.model import ExpertsSpec


def test_ways_there_and_back_are_sums_by_token() -> None:
    """Forward and backward, with an expert that nobody chose, and without any token."""
    draw = torch.Generator().manual_seed(1)
    for tokens in (9, 0):
        chosen = torch.tensor([[0, 4], [4, 1], [2, 0]]).repeat(3, 1)[:tokens]
        places = torch.arange(tokens)
        order = by_expert(chosen.flatten(), places.repeat_interleave(2), 2 * places, 5)
        assert order.sizes.tolist() == [chosen.eq(n).sum() for n in range(5)]
        x, shares, weight = (
            torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()
            for shape in ((tokens, 3), (tokens, 2), (5, 4, 3))
        )

        def ours(x: Tensor, shares: Tensor, weight: Tensor, order=order) -> Tensor:
            each = grouped_product(spread(x, order), weight, order.ends)
            return together(each, shares.flatten(), order)

        def plain(x: Tensor, shares: Tensor, weight: Tensor, chosen=chosen) -> Tensor:
            each = torch.einsum("nd,nkfd->nkf", x, weight[chosen])
            return (each * shares[..., None]).sum(1)

        grad = torch.randn(tokens, 4, generator=draw, dtype=torch.float64)
        found, wanted = (
            (y := form(x, shares, weight), *torch.autograd.grad(y, (x, shares, weight), grad))
            for form in (ours, plain)
        )
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ends", [[0, 4, 4, 12], [0, 0, 0, 0], [12, 12, 12, 12]], ids=str)
def test_pytorchs_grouped_product_is_ours(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ends: list[int]
) -> None:
    """Forward and backward, bit for bit, with experts that nobody chose; a width that it does not
    take is computed all the same."""
    grouped_product_is_a_loop(monkeypatch, "cpu", dtype, ends)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("ends", [[0, 4, 4, 12], [0, 0, 0, 0], [12, 12, 12, 12]], ids=str)
def test_pytorchs_grouped_product_is_ours_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    """Forward and backward, with experts that nobody chose."""
    grouped_product_is_a_loop(monkeypatch, "cuda", torch.bfloat16, ends)


def grouped_product_is_a_loop(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, ends: list[int]
) -> None:
    calls = []
    theirs = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or theirs(*a, **k))
    for d_in, is_taken in ((16, True), (15, False)):
        calls.clear()
        x, weight, grad = (
            torch.randn(*shape, device=device, dtype=dtype).requires_grad_()
            for shape in ((ends[-1], d_in), (4, 24, d_in), (ends[-1], 24))
        )
        both = []
        for form in (grouped_product, one_by_one):
            y = form(x, weight, torch.tensor(ends, dtype=torch.int32, device=device))
            both.append((y, *torch.autograd.grad(y, (x, weight), grad)))
        assert bool(calls) == is_taken
        near = {"rtol": 0, "atol": 0} if device == "cpu" else {}
        for mine, other in zip(*both, strict=True):
            torch.testing.assert_close(mine, other, **near)


def test_tokens_of_each_expert_are_counted() -> None:
    layer = Experts(2, 4, ExpertsSpec(count=3, top_k=2))
    for param in layer.parameters():
        torch.nn.init.zeros_(param)
    layer.router.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    layer(torch.tensor([[[2.0, 1.0], [3.0, -9.0], [1.0, 2.0]]]))  # 0 and 1, 0 and 2, 1 and 0
    assert layer.tokens.tolist() == [3, 2, 1]


def _layer(spec: ExpertsSpec, *, seq_len: int) -> Experts:
    torch.manual_seed(1)
    layer = Experts(4, 6, spec, seq_len=seq_len).double()
    for param in layer.parameters():
        torch.nn.init.normal_(param)
    return layer


def test_an_earlier_token_never_gives_way_to_a_later_one() -> None:
    """What an expert has no room for goes on without it, whatever comes after it or beside it."""
    layer = _layer(
        ExpertsSpec(count=3, top_k=1, capacity=0.75, normed=False), seq_len=8
    )  # two each
    x = torch.randn(5, 8, 4, dtype=torch.float64)
    x[0] = x[0, 0]  # all want one expert
    whole, _ = layer(x)
    assert layer.tokens.sum() < 40 and layer.tokens.max() <= 5 * 2
    assert whole[0].abs().sum(-1).bool().tolist() == [True] * 2 + [False] * 6
    for length in (1, 3, 7):
        torch.testing.assert_close(layer(x[:, :length])[0], whole[:, :length], rtol=0, atol=1e-14)
    for alone, other in zip(x.split(2), whole.split(2), strict=True):
        torch.testing.assert_close(layer(alone)[0], other, rtol=0, atol=1e-14)


def test_experts_that_choose_have_equal_loads() -> None:
    """Of every sample; a token that nobody wants has a result of zero."""
    layer = _layer(ExpertsSpec(count=3, top_k=1, choice="experts"), seq_len=7)
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    whole, _ = layer(x)
    assert layer.tokens.tolist() == [5 * 2] * 3
    scores = layer.router(x)[1]
    taken = scores.topk(2, dim=1).indices  # [samples, 2, experts]
    wanted = torch.zeros_like(scores).scatter_(1, taken, 1.0).sum(-1)
    assert torch.equal(whole.abs().sum(-1) > 0, wanted > 0) and wanted.min() == 0
    torch.testing.assert_close(layer(x[3:])[0], whole[3:], rtol=0, atol=1e-14)


def test_a_task_has_experts_and_its_tokens_have_no_say() -> None:
    layer = _layer(ExpertsSpec(count=5, top_k=2, tasks=3), seq_len=6)
    tasks = torch.tensor([2, 0, 2, 2])
    layer(torch.randn(4, 6, 4, dtype=torch.float64), tasks)
    wanted = torch.zeros(5, dtype=torch.int64)
    for task in tasks:
        wanted[layer.router.weight[:, task].topk(2).indices] += 6
    assert layer.tokens.tolist() == wanted.tolist()
    for wrong in (3, -1):
        with pytest.raises(ConfigError) as caught:
            layer(torch.zeros(1, 6, 4, dtype=torch.float64), torch.tensor([wrong]))
        assert str(caught.value) == (
            f"tasks = {wrong}: expected numbers from 0 to 2. Tasks are numbered from 0; "
            "experts.tasks says how many there are."
        )
