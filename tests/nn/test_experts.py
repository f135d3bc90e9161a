"""The layer of experts by itself, against sums written out."""

import torch
from torch import Tensor

from weft.nn.experts.feed_forward import Experts
from weft.nn.experts.grouped import by_expert, grouped_product, spread, together
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


def test_tokens_of_each_expert_are_counted() -> None:
    layer = Experts(2, 4, ExpertsSpec(count=3, top_k=2), seq_len=3)
    for param in layer.parameters():
        torch.nn.init.zeros_(param)
    layer.router.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    layer(torch.tensor([[[2.0, 1.0], [3.0, -9.0], [1.0, 2.0]]]))  # 0 and 1, 0 and 2, 1 and 0
    assert layer.tokens.tolist() == [3, 2, 1]
