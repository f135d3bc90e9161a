"""Blocks of queries give what PyTorch's own attention gives, values and gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn import causal_attention as module
from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Documents, Packed
from weft.nn.full_attention import attention_by_length, full_attention
from weft.nn.varlen import has_kernel

CASES = {
    "one block": (2, 5, 2, 2),
    "shared keys": (2, 7, 6, 2),
    "one key head": (1, 3, 4, 1),
    "uneven blocks": (1, 2 * module.BLOCK_QUERIES + 3, 4, 2),
    "probabilities made again": (1, module.KEEP_SEQ + 1, 2, 1),
}
SHORT = np.array([[0, 0, 1, 1, 1, 4, 4], [2, 2, 2, 2, 2, 2, 3]])
LONG = np.random.default_rng(3).random((2, 2 * module.BLOCK_QUERIES + 3)).argsort(1) % 50 == 0
DOCUMENTS = {
    "short": ("shared keys", SHORT),
    "over blocks": ("uneven blocks", LONG.cumsum(1)),
    "from block to block": (
        "uneven blocks",
        np.arange(LONG.shape[1])[None] // module.BLOCK_QUERIES,
    ),
    "alone": ("uneven blocks", np.arange(LONG.shape[1])[None]),
}


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


def _by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    return attention_by_length(q, k, v, packed, causal=True)


def _compare(
    inputs: list[Tensor],
    segments: np.ndarray | None,
    tolerance: float,
    attend: Callable[..., Tensor] = causal_attention,
) -> None:
    seq = inputs[0].shape[1]
    may_look, packed = torch.ones(seq, seq, dtype=torch.bool), None
    if attend is not full_attention:
        may_look = may_look.tril()
    if segments is not None:
        packed = Documents.of(segments, "cpu").packed
        same = torch.from_numpy(segments[:, :, None] == segments[:, None, :])
        may_look = (same & may_look)[:, None]
    ours, theirs = attend(*inputs, packed), _reference(*inputs, may_look)
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


@pytest.mark.parametrize("keep", [10**6, 0], ids=["kept", "made again"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_match_the_formula(name: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_SEQ", keep)
    case, segments = DOCUMENTS[name]
    inputs = _inputs((len(segments), *CASES[case][1:]), torch.float64)
    _compare(inputs, segments, 1e-12)


@pytest.mark.parametrize("attend", [full_attention, _by_length])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_equal_length_together(name: str, attend: Callable[..., Tensor]) -> None:
    """Without padding, in one call for each length."""
    case, segments = DOCUMENTS[name]
    inputs = _inputs((len(segments), *CASES[case][1:]), torch.float64)
    _compare(inputs, segments, 1e-12, attend)


def test_both_ways_without_documents() -> None:
    _compare(_inputs(CASES["uneven blocks"], torch.float64), None, 1e-12, full_attention)


@pytest.mark.parametrize("name", [*DOCUMENTS, "one"])
def test_the_last_queries_of_more_keys_see_what_they_see_among_all(name: str) -> None:
    case, segments = DOCUMENTS.get(name, ("uneven blocks", np.zeros((1, 2), dtype=np.int64)))
    inputs = _inputs((len(segments), *CASES[case][1:]), torch.float64)
    packed = None if name == "one" else Documents.of(segments, "cpu").packed
    whole = causal_attention(*inputs, packed)
    q, k, v = inputs
    places = [range(2), range(2, 6), range(6, q.shape[1])]
    parts = [
        causal_attention(
            q[:, part.start : part.stop],
            k[:, : part.stop],
            v[:, : part.stop],
            None if packed is None else packed.ending(part),
        )
        for part in places
    ]
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).double()
    for mine, other in zip(
        (torch.cat(parts, 1), *torch.autograd.grad(torch.cat(parts, 1), inputs, grad)),
        (whole, *torch.autograd.grad(whole, inputs, grad)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_documents_do_not_see_each_other() -> None:
    inputs = _inputs(CASES["shared keys"], torch.float64)
    packed = Documents.of(SHORT, "cpu").packed
    changed = [x.detach().clone() for x in inputs]
    changed[1][0, 1] += 1  # a key of the first document
    before, after = causal_attention(*inputs, packed), causal_attention(*changed, packed)
    assert torch.equal(before[0, 2:], after[0, 2:])
    assert not torch.equal(before[0, 1], after[0, 1])


def test_one_document_is_plain_causal_attention() -> None:
    inputs = _inputs(CASES["uneven blocks"], torch.float64)
    packed = Documents.of(np.zeros((1, inputs[0].shape[1]), dtype=np.int32), "cpu").packed
    torch.testing.assert_close(
        causal_attention(*inputs, packed), causal_attention(*inputs, None), rtol=0, atol=0
    )


def test_packed_documents_cost_no_mask_over_all_pairs() -> None:
    """Nothing that is made has a number for every pair of tokens, nor as many as that."""
    seq = 8 * module.BLOCK_QUERIES
    q, k, v = _inputs((1, seq, 1, 1), torch.float32)
    packed = Documents.of(np.arange(seq)[None] // 100, "cpu").packed
    with Largest() as made:
        causal_attention(q, k, v, packed).sum().backward()
    assert 0 < made.elements <= seq * module.BLOCK_QUERIES


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in made if isinstance(each, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
@pytest.mark.parametrize("attend", [causal_attention, full_attention])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_kernel_for_unequal_lengths_gives_the_same(
    name: str, attend: Callable[..., Tensor]
) -> None:
    """Its CPU twins are ``test_documents_match_the_formula`` and the one for equal lengths."""
    case, segments = DOCUMENTS[name]
    shape = (len(segments), *CASES[case][1:])
    inputs = [x.detach().repeat(1, 1, 1, 4) for x in _inputs(shape, torch.bfloat16)]
    host = [x.requires_grad_() for x in inputs]
    device = [x.detach().cuda().requires_grad_() for x in inputs]
    packed = Documents.of(segments, "cuda").packed
    assert has_kernel(device[0], packed)
    here = attend(*host, Documents.of(segments, "cpu").packed)
    there = attend(*device, packed)
    torch.testing.assert_close(there.cpu(), here, rtol=3e-2, atol=3e-2)
    ours, theirs = (
        torch.autograd.grad(y.float().sum(), x) for y, x in ((there, device), (here, host))
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=6e-2, atol=6e-2)


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


@pytest.mark.parametrize(("width", "fits"), [(4, False), (8, True), (20, False), (256, True)])
def test_widths_that_the_kernel_takes(width: int, fits: bool) -> None:
    """On a card it refuses others itself, in the middle of a step."""
    packed: Any = SimpleNamespace(borders=torch.tensor([0, 3, 5]))
    assert has_kernel(torch.zeros(1, 5, 2, width, dtype=torch.bfloat16), packed) is fits
