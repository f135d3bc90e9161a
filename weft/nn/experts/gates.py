"""Which experts a token goes to, and how much of each it gets.

A gate turns a token's logits into scores, one an expert; the greatest are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from weft.plan.model import ExpertsSpec

GATES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "softmax": lambda logits: torch.softmax(logits, dim=-1),  # arXiv 2101.03961
        "sigmoid": torch.sigmoid,  # arXiv 2412.19437, equation 15
    }
)
"""By name: logits ``[..., experts]`` to scores."""


class Routed(NamedTuple):
    """What a gate says of ``n`` tokens."""

    experts: Tensor
    """``[n, top_k]`` int64: the chosen ones."""
    shares: Tensor
    """``[n, top_k]``: by what their results are multiplied."""


def routed(scores: Tensor, spec: ExpertsSpec, bias: Tensor | None) -> Routed:
    """The greatest of ``[n, experts]``, as ``spec`` says. ``bias``, ``[experts]``: added to choose,
    and to no share."""
    wanted = scores if bias is None else scores.detach() + bias
    if spec.groups > 1:
        wanted = _of_groups(wanted.detach(), spec)
    shares, experts = torch.topk(wanted, spec.top_k, dim=-1)
    if wanted is not scores:
        shares = scores.gather(-1, experts)
    return Routed(experts, divided(shares, spec))


def divided(shares: Tensor, spec: ExpertsSpec) -> Tensor:
    """Shares of a token, ``[.., of each]``, as ``spec`` wants them; all may be 0."""
    if spec.normed:
        total = shares.sum(-1, keepdim=True)
        shares = shares / (total if spec.choice == "tokens" else total.where(total != 0, 1.0))
    return shares if spec.scale == 1 else shares * spec.scale


def _of_groups(scores: Tensor, spec: ExpertsSpec) -> Tensor:
    """``scores`` of the best groups, minus infinity of the others."""
    each = scores.shape[-1] // spec.groups
    groups = scores.view(len(scores), spec.groups, each)  # perhaps of no token at all
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    kept = best.topk(spec.top_groups, dim=-1).indices
    is_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, value=False)
    return groups.masked_fill(is_out[..., None], -torch.inf).flatten(-2)


def balance_loss(scores: Tensor, loads: Tensor) -> Tensor:
    """The loss of unequal loads, by sequence (arXiv 2412.19437, equations 17 to 20), times tokens.

    ``scores`` ``[batch, seq, experts]``, ``loads`` ``[batch, experts]``: how often tokens of the
    sequence chose each. For each sequence the sum over experts of its part of these choices, times
    experts, times its mean score: 1 where loads are equal. Of a sequence alone, so no plan changes
    it; times its tokens, so that it is added to losses of tokens, and tokens that are a part of a
    sequence have a part of it. A scalar.
    """
    loads = loads.to(scores.dtype)
    parts = loads / loads.sum(-1, keepdim=True).clamp(min=1)
    shares = (scores / scores.sum(-1, keepdim=True)).sum(1)
    return (parts * shares).sum() * scores.shape[-1]


def z_loss(logits: Tensor) -> Tensor:
    """``sum(logsumexp(logits)^2)`` over tokens (arXiv 2202.08906, equation 5): a scalar."""
    return logits.logsumexp(-1).square().sum()


def loads_of(experts: Tensor, experts_in_all: int) -> Tensor:
    """``[batch, seq, top_k]`` to how often each was chosen, ``[batch, experts]``."""
    flat = experts.flatten(1)
    found = flat.new_zeros(len(flat), experts_in_all)
    return found.scatter_add_(1, flat, torch.ones_like(flat))  # whole numbers: in any order
