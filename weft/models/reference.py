"""What a family's model is checked against: the same computation, written out a second time.

A reference is a plain function of parameters by logical name, in fp64, made of PyTorch's own
operations. It uses nothing of ``weft.nn`` and of the families' models, so that a mistake there
does not hide by being on both sides (``weft verify``). Plain and slow is what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
"""Whole parameters by logical name, fp64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One global batch."""

    tokens: Tensor
    """``[samples, seq]`` int64."""
    targets: Tensor
    """``[samples, seq]`` int64."""
    weights: Tensor
    """``[samples, seq]`` fp64: of each target in the loss."""
    segments: Tensor
    """``[samples, seq]`` int: the number of a token's document in its sample."""
    numbers: Tensor
    """``[samples]`` int64: which samples of the run these are."""
    seed: int
    """Of the run; with the step, what dropout depends on beside the sample and the place."""
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A family's model, second time."""

    loss: Callable[[Any, Params, Samples], tuple[Tensor, Tensor]]
    """From the model's description: the sum of weight times loss, and the sum of weights."""
    tables: frozenset[str]
    """Parameters that are looked up in, not multiplied by: matrices without weight decay."""
    settled: Callable[[Any, Params, Samples], Params] = lambda *_: {}
    """New values, after a step with these samples, of parameters that no gradient changes."""


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    """Each token looks at the earlier ones of its document, and at itself.

    ``q`` is ``[samples, seq, heads, d_head]``, ``k`` and ``v`` are ``[samples, seq, kv_heads,
    d_head]``, ``segments`` is as in ``Samples``; the result is ``[samples, seq, heads * d_head]``.
    """
    queries_a_key = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(queries_a_key, dim=2) for x in (k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[3])
    places = torch.arange(q.shape[1])
    is_seen = (places[:, None] >= places) & (segments[:, :, None] == segments[:, None, :])
    scores = scores.masked_fill(~is_seen[:, None], -math.inf)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float64)
    return torch.einsum("nhqk,nkhd->nqhd", probabilities, v).flatten(2)


def next_token(logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """The weighted sum of cross-entropies, and the sum of weights, of ``[samples, seq, vocab]``."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    chosen = log_probabilities.gather(-1, samples.targets[..., None])[..., 0]
    return -(samples.weights * chosen).sum(), samples.weights.sum()
