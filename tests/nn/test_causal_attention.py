"""Blocks of queries give what PyTorch's own attention gives, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn import causal_attention as module
from weft.nn.causal_attention import causal_attention
from weft.nn.context import attention_mask

CASES = {
    "one block": (2, 5, 2, 2),
    "shared keys": (2, 7, 6, 2),
    "one key head": (1, 3, 4, 1),
    "uneven blocks": (1, 2 * module.BLOCK_QUERIES + 3, 4, 2),
    "probabilities made again": (1, module.KEEP_SEQ + 1, 2, 1),
}
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 4, 4], [2, 2, 2, 2, 2, 2, 3]])


def _inputs(case: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    batch, seq, heads, kv_heads = case
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(batch, seq, h, 8, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The formula, with every key head repeated and nothing left out."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v))
    v = v.repeat_interleave(group, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _compare(inputs: list[Tensor], mask: Tensor | None, tolerance: float) -> None:
    seq = inputs[0].shape[1]
    whole = torch.ones(seq, seq, dtype=torch.bool).tril() if mask is None else mask
    ours, theirs = causal_attention(*inputs, mask), _reference(*inputs, whole)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours.dtype)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 6e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_matches_the_formula(name: str, dtype: torch.dtype, tolerance: float) -> None:
    _compare(_inputs(CASES[name], dtype), None, tolerance)


def test_documents_do_not_see_each_other() -> None:
    inputs = _inputs(CASES["shared keys"], torch.float64)
    mask = attention_mask(SEGMENTS)
    assert mask is not None and mask.shape == (2, 1, 7, 7)
    _compare(inputs, mask, 1e-12)
    changed = [x.detach().clone() for x in inputs]
    changed[1][0, 1] += 1  # a key of the first document
    before, after = causal_attention(*inputs, mask), causal_attention(*changed, mask)
    assert torch.equal(before[0, 2:], after[0, 2:])
    assert not torch.equal(before[0, 1], after[0, 1])


def test_one_document_is_plain_causal_attention() -> None:
    inputs = _inputs(CASES["uneven blocks"], torch.float64)
    mask = attention_mask(torch.zeros(1, inputs[0].shape[1], dtype=torch.int32))
    torch.testing.assert_close(
        causal_attention(*inputs, mask), causal_attention(*inputs, None), rtol=0, atol=0
    )


def test_agrees_with_the_kernel_that_other_devices_use() -> None:
    q, k, v = (x.transpose(1, 2) for x in _inputs(CASES["shared keys"], torch.float64))
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours = causal_attention(*(x.transpose(1, 2) for x in (q, k, v)), None)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_keeping_and_making_probabilities_again_agree_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = _inputs(CASES["uneven blocks"], torch.bfloat16)
    grads = []
    for keep in (10**6, 0):
        monkeypatch.setattr(module, "KEEP_SEQ", keep)
        result = causal_attention(*inputs, None)
        grads.append(torch.autograd.grad(result, inputs, torch.ones_like(result)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(
        lambda q, k, v: causal_attention(q, k, v, None), _inputs((1, 4, 4, 2), torch.float64)
    )
