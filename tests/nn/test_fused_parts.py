"""Attention by kernels that give logarithms of sums, put together, is attention at once.

PyTorch's kernels for GPUs have stand-ins here, with their signatures and shapes, so that what is
asked of them runs; that theirs do the same needs a GPU.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.nn.fused_parts import ON_HOST, WIDE, Alike, Found, Kernel, Runs, Unequal, kernel_for

HEADS, KV_HEADS, D_HEAD, D_VALUE = 4, 2, 12, 7
KERNELS: dict[str, Kernel] = {
    "host": partial(Alike, ON_HOST),
    "unequal": Unequal,
    "wide": partial(Alike, WIDE),
}


def scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """``[heads, queries, keys]`` of ``[queries, heads, d_head]``."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = torch.einsum("qhd,khd->hqk", q, k) * scale
    return (
        found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf)
        if causal
        else found
    )


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The formula, and the logarithms ``[heads, queries]``."""
    s = scores(q, k, scale, causal)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


def differentiated(
    grad: Tensor, qkv: tuple[Tensor, ...], found: tuple[Tensor, Tensor], scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients where result and logarithms are those of more keys than there are."""
    q, k, v = qkv
    many = q.shape[1] // k.shape[1]
    p = (scores(q, k, scale, causal) - found[1][..., None]).exp()
    keys, values = (x.repeat_interleave(many, dim=1) for x in (k, v))
    d_p = torch.einsum("qhd,khd->hqk", grad, values)
    d_s = p * (d_p - (grad * found[0]).sum(-1).T[..., None]) * scale
    of_keys = torch.einsum("hqk,qhd->khd", d_s, q), torch.einsum("hqk,qhd->khd", p, grad)
    shared = (x.unflatten(1, (k.shape[1], many)).sum(2) for x in of_keys)
    return torch.einsum("hqk,khd->qhd", d_s, keys), *shared


def unequal(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> Any:
    """As ``_flash_attention_forward``."""
    refuse_unequal(q, k, v, a, b, *rest[:2])
    each = [attended(q[m], k[s], v[s], more["scale"], rest[3]) for m, s in parts(a, b)]
    mixed, log_sums = zip(*each, strict=True)
    nothing = torch.zeros(2)
    return torch.cat(mixed), torch.cat(log_sums, dim=1), nothing, nothing, nothing


def unequal_back(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    *rest: Any,
    **more: Any,
) -> Any:
    """As ``_flash_attention_backward``."""
    refuse_unequal(q, k, v, a, b, *rest[:2])
    assert grad.shape == out.shape == q.shape and lse.shape == (q.shape[1], len(q))
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for m, s in parts(a, b):
        qkv = q[m], k[s], v[s]
        each = differentiated(grad[m], qkv, (out[m], lse[:, m]), more["scale"], rest[3])
        for total, where, some in zip(found, (m, s, s), each, strict=True):
            total[where] = some
    return tuple(found)


def refuse_unequal(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *most: int) -> None:
    """What the kernel does not take."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and not q.shape[2] % 8
    assert a.dtype == b.dtype == torch.int32
    assert [int(x.diff().max()) for x in (a, b)] == [*most]
    assert (int(a[-1]), int(b[-1])) == (len(q), len(k))


def parts(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice]]:
    for m, s in zip(pairwise(a.tolist()), pairwise(b.tolist()), strict=True):
        yield slice(*m), slice(*s)


def wide(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
    """As ``_scaled_dot_product_efficient_attention``."""
    bias, asked, *more = rest  # what is as it is by default does not come
    assert asked and bias is None and q.shape[1] == k.shape[1] == v.shape[1]
    causal = bool(more and more[1])
    each = [
        attended(*(x.transpose(0, 1) for x in one), scale, causal)
        for one in zip(q, k, v, strict=True)
    ]
    mixed, log_sums = (torch.stack(x) for x in zip(*each, strict=True))
    nothing = torch.zeros(())
    return mixed.transpose(1, 2), F.pad(log_sums, (0, -q.shape[2] % 32)), nothing, nothing


def wide_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
    """As its backward."""
    _, out, lse, _, _, _, asked, *more = rest
    assert not lse.shape[2] % 32 and asked == [True, True, True, False]
    found = []
    for one in range(len(q)):
        g, *qkv, o = (x[one].transpose(0, 1) for x in (grad, q, k, v, out))
        each = differentiated(g, tuple(qkv), (o, lse[one, :, : q.shape[2]]), scale, bool(more))
        found.append([x.transpose(0, 1) for x in each])
    return *(torch.stack(x) for x in zip(*found, strict=True)), None


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    kernels = library.Library("aten", "IMPL")
    for name, call in {
        "_flash_attention_forward": unequal,
        "_flash_attention_backward": unequal_back,
        "_scaled_dot_product_efficient_attention": wide,
        "_scaled_dot_product_efficient_attention_backward": wide_back,
    }.items():
        kernels.impl(name, call, "CPU")
    yield
    kernels._destroy()


def of_runs(*each: tuple[range, range], causal: bool) -> Runs:
    starts = [torch.tensor([x.start for x in of]) for of in zip(*each, strict=True)]
    lengths = [torch.tensor([len(x) for x in of]) for of in zip(*each, strict=True)]
    return Runs(starts[0], lengths[0], starts[1], lengths[1], causal)


@pytest.mark.parametrize("name", KERNELS)
def test_keys_that_come_one_after_the_other(name: str) -> None:
    """Nine queries see themselves in three runs; then five of them the first six of other keys, two
    all but one of the rest; one document is nobody's."""
    device = torch.device("cpu")
    own = of_runs(
        (range(4), range(4)), (range(4, 5), range(4, 5)), (range(5, 9), range(5, 9)), causal=True
    )
    others = of_runs((range(5), range(6)), (range(7, 9), range(7, 11)), causal=False)
    seen = torch.zeros(9, 9 + 12, dtype=torch.bool)
    for runs, first in ((own, 0), (others, 9)):
        for start, many, key, keys in zip(*(x.tolist() for x in runs[:4]), strict=True):
            mine = torch.ones(many, keys, dtype=torch.bool)
            seen[start : start + many, first + key : first + key + keys] = (
                mine.tril() if runs.causal else mine
            )
    generator = torch.Generator().manual_seed(5)
    sizes = [
        (9, HEADS, D_HEAD),
        (21, KV_HEADS, D_HEAD),
        (21, KV_HEADS, D_VALUE),
        (9, HEADS, D_VALUE),
    ]
    q, k, v, grad = (
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes
    )
    exact = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)
    wanted = [exact.detach(), *torch.autograd.grad(exact, (q, k, v), grad)]
    with torch.no_grad():
        calls = [KERNELS[name](runs, device) for runs in (own, others)]
        held = [(k[:9], v[:9]), (k[9:], v[9:])]
        found = Found.nothing(q, D_VALUE)
        for call, keys in zip(calls, held, strict=True):
            found.add(call.rows, *call.forward(q, *keys))
        d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
        for call, keys, first in zip(calls, held, (0, 9), strict=True):
            some = call.backward(grad, (q, *keys), found)
            rows = (call.rows, call.keys + first, call.keys + first)
            for total, where, part in zip((d_q, d_k, d_v), rows, some, strict=True):
                total.index_add_(0, where, part)
    for mine, other in zip((found.mixed, d_q, d_k, d_v), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_which_kernel() -> None:
    def of(device: str, dtype: torch.dtype, width: int = 64) -> Any:
        with FakeTensorMode():
            kernel: Any = kernel_for(
                *(torch.empty(1, 1, 1, width, dtype=dtype, device=device),) * 2
            )
        return kernel.args[0] if isinstance(kernel, partial) else kernel

    assert of("cpu", torch.float64) is ON_HOST
    assert of("cuda", torch.bfloat16) is of("cuda", torch.float16) is Unequal
    assert of("cuda", torch.float32) is WIDE
    assert (
        of("cuda", torch.float64)
        is of("cuda", torch.bfloat16, 320)
        is of("meta", torch.bfloat16)
        is None
    )
