"""Attention of some queries to some keys at a time by PyTorch's fused kernels.

Beside what a query makes of the values, a kernel gives the logarithm of the sum of its
exponentials. By these, what it makes of some keys and of others is put together in fp32 or fp64,
and backward of some keys takes the result and the logarithms of all (arXiv 2310.01889). Which
kernel that is differs from device to device; all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.nn.norm import wide_dtype
from weft.nn.varlen import HALVES, MAX_D_HEAD
from weft.platform.registry import PLATFORMS
from weft.platform.upload import upload

_EIGHT = 8
"""Channels of a head that the kernel for unequal lengths takes are a multiple of this."""
_ROWS = 32
"""Queries that the kernel for fp32 gives logarithms of are a multiple of this."""


Three = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values, most often."""


class Runs(NamedTuple):
    """Runs of consecutive queries, each with the consecutive keys that all of it see; causal: with
    as many, of which each query sees those up to its own. Nothing is in two runs. Numbers are of
    all samples, one after the other, on the host."""

    starts: Tensor
    """``[runs]`` of queries."""
    lengths: Tensor
    key_starts: Tensor
    key_lengths: Tensor
    causal: bool


class Call(Protocol):
    """Attention of some runs. Tensors are of all that there is, ``[tokens, heads, d_head]``."""

    @property
    def rows(self) -> Tensor:
        """Which queries it is of, in the order of its results."""

    @property
    def keys(self) -> Tensor:
        """Likewise."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What its queries make of the values, and the logarithms ``[queries, heads]``."""

    def backward(self, grad: Tensor, inputs: Three, found: Found) -> Three:
        """Gradients of its queries, keys and values, from that of the result of all keys."""


Kernel = Callable[[Runs, torch.device], Call]


def kernel_for(q: Tensor, v: Tensor) -> Kernel | None:
    """For queries and values like these; None where PyTorch has none that gives logarithms."""
    kind = q.device.type
    if kind == HOST:
        return partial(Alike, ON_HOST)
    if kind not in PLATFORMS or not PLATFORMS[kind].has_varlen:
        return None
    if max(q.shape[-1], v.shape[-1]) > MAX_D_HEAD:
        return None
    if q.dtype in HALVES:
        return Unequal
    return partial(Alike, WIDE) if q.dtype == torch.float32 else None


class Found(NamedTuple):
    """What queries have made of the values so far, in wide dtypes; or in backward of all, in the
    dtype of the queries."""

    mixed: Tensor
    """``[tokens, heads, d_value]``."""
    log_sums: Tensor
    """``[tokens, heads]``."""

    @staticmethod
    def nothing(q: Tensor, d_value: int) -> Found:
        """Of queries ``[tokens, heads, d_head]`` that have seen no key."""
        mixed = q.new_zeros((*q.shape[:-1], d_value), dtype=wide_dtype(q))
        return Found(mixed, torch.full_like(mixed[..., 0], -torch.inf))

    def add(self, rows: Tensor, mixed: Tensor, log_sums: Tensor) -> None:
        """What some of them, each once, made of some more."""
        before = self.log_sums[rows]
        both = torch.logaddexp(before, log_sums)
        total = self.mixed[rows] * (before - both).exp()[..., None]
        self.mixed[rows] = total.addcmul_(mixed, (log_sums - both).exp()[..., None])
        self.log_sums[rows] = both


class Unequal:
    """All runs are one call of the kernel for unequal lengths, which has one width for all."""

    def __init__(self, runs: Runs, device: torch.device) -> None:
        self._causal = runs.causal
        self.rows = _numbers(runs.starts, runs.lengths, device)
        self.keys = _numbers(runs.key_starts, runs.key_lengths, device)
        many = runs.lengths, runs.key_lengths
        self._longest = [int(lengths.max()) for lengths in many]
        self._borders = [upload(_borders(lengths), device) for lengths in many]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mixed, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            *_of_one_width(q[self.rows], k[self.keys], v[self.keys]),
            *self._borders,
            *self._longest,
            0.0,  # nothing is dropped
            self._causal,
            False,
            scale=q.shape[-1] ** -0.5,
        )
        return mixed[..., : v.shape[-1]], log_sums.T

    def backward(self, grad: Tensor, inputs: Three, found: Found) -> Three:
        q, k, v = inputs
        given = (grad[self.rows], q[self.rows], k[self.keys], v[self.keys], found.mixed[self.rows])
        drawn = torch.zeros(2, dtype=torch.uint64, device=q.device)
        of_queries, of_keys, of_values = torch.ops.aten._flash_attention_backward(
            *_of_one_width(*given),
            found.log_sums[self.rows].T.contiguous(),
            *self._borders,
            *self._longest,
            0.0,
            self._causal,
            drawn,
            drawn[0],
            scale=q.shape[-1] ** -0.5,
        )
        width = slice(q.shape[-1])
        return of_queries[..., width], of_keys[..., width], of_values[..., : v.shape[-1]]


class Dense(NamedTuple):
    """A kernel for sequences of one length ``[batch, heads, seq, d_head]``."""

    forward: Callable[[Three, bool], tuple[Tensor, Tensor]]
    """Of queries, keys and values; and whether it is causal."""
    backward: Callable[[Tensor, Three, Found, bool], Three]


class Alike:
    """Runs as long as each other, in queries and in keys, are one call."""

    def __init__(self, dense: Dense, runs: Runs, device: torch.device) -> None:
        self._dense, self._causal = dense, runs.causal
        self._each: list[tuple[Tensor, Tensor]] = []
        sizes = zip(runs.lengths.tolist(), runs.key_lengths.tolist(), strict=True)
        for many, seen in dict.fromkeys(sizes):
            some = (runs.lengths == many) & (runs.key_lengths == seen)
            rows = runs.starts[some][:, None] + torch.arange(many)
            keys = runs.key_starts[some][:, None] + torch.arange(seen)
            self._each.append((upload(rows, device), upload(keys, device)))
        self.rows, self.keys = (
            torch.cat([x.flatten() for x in of]) for of in zip(*self._each, strict=True)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            self._dense.forward(_taken((q, k, v), (rows, keys, keys)), self._causal)
            for rows, keys in self._each
        ]
        mixed, log_sums = (_in_a_row(each) for each in zip(*found, strict=True))
        return mixed, log_sums

    def backward(self, grad: Tensor, inputs: Three, found: Found) -> Three:
        each = []
        for rows, keys in self._each:
            of_rows = _taken((grad, found.mixed, found.log_sums), (rows,) * 3)
            given = _taken(inputs, (rows, keys, keys))
            each.append(self._dense.backward(of_rows[0], given, Found(*of_rows[1:]), self._causal))
        of_queries, of_keys, of_values = (_in_a_row(some) for some in zip(*each, strict=True))
        return of_queries, of_keys, of_values


def _taken(tensors: Three, numbers: Three) -> Three:
    """Some ``[runs, length]`` of ``[tokens, heads, ..]`` each to ``[runs, heads, length, ..]``."""
    a, b, c = (x[of].transpose(1, 2) for x, of in zip(tensors, numbers, strict=True))
    return a, b, c


def _in_a_row(found: tuple[Tensor, ...]) -> Tensor:
    """The inverse, all runs one after the other."""
    return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in found])


def _on_host(inputs: Three, causal: bool) -> tuple[Tensor, Tensor]:
    q, _, v = inputs
    mixed, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_of_one_width(*inputs), 0.0, causal, scale=q.shape[-1] ** -0.5
    )
    return mixed[..., : v.shape[-1]], log_sums


def _on_host_back(grad: Tensor, inputs: Three, found: Found, causal: bool) -> Three:
    q, _, v = inputs
    given = (*_of_one_width(grad, *inputs, found.mixed), found.log_sums)
    of_queries, of_keys, of_values = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, causal, scale=q.shape[-1] ** -0.5
        )
    )
    width = slice(q.shape[-1])
    return of_queries[..., width], of_keys[..., width], of_values[..., : v.shape[-1]]


def _wide(inputs: Three, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = inputs
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mixed, log_sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, keys, values, None, True, 0.0, causal, scale=q.shape[-1] ** -0.5
    )
    return mixed, log_sums[..., : q.shape[2]]


def _wide_back(grad: Tensor, inputs: Three, found: Found, causal: bool) -> Three:
    q, k, v = inputs
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    log_sums = F.pad(found.log_sums, (0, 0 if torch.version.hip else -q.shape[2] % _ROWS))
    given = (grad, q, keys, values, None, found.mixed, log_sums)
    drawn = torch.zeros((), dtype=torch.int64, device=q.device)
    asked = [True, True, True, False]
    of_queries, of_keys, of_values, _ = (
        torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *given, drawn, drawn, 0.0, asked, causal, scale=q.shape[-1] ** -0.5
        )
    )
    d_k, d_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (of_keys, of_values))
    return of_queries, d_k, d_v


ON_HOST = Dense(_on_host, _on_host_back)
WIDE = Dense(_wide, _wide_back)
"""For fp32 on GPUs; each query head has a key head there."""


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """With channels of zeros where some have fewer, which kernels do not take."""
    width = -(-max(x.shape[-1] for x in tensors) // _EIGHT) * _EIGHT
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _borders(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _numbers(starts: Tensor, lengths: Tensor, device: torch.device) -> Tensor:
    """Of all in runs, one after the other, made there: the host only says where runs are."""
    total = int(lengths.sum())
    before = upload(starts - lengths.cumsum(0) + lengths, device)
    each = torch.repeat_interleave(before, upload(lengths, device), output_size=total)
    return each + torch.arange(total, device=device)
