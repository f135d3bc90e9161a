"""Pairs of a token and an expert: tokens choose, with or without limits of experts, or experts do.

Limits are of every sample by itself, so that no plan changes who goes where: what divides a
batch among anybody leaves each sample whole. What divides the tokens of a sample cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.experts.gates import Routed, divided
from weft.plan.model import ExpertsSpec

STEPS = 2**20
"""Of scores from 0 to 1: experts that choose tell no less apart."""


class Pairs(NamedTuple):
    """In the order of ``n`` tokens. There may be any number of one token."""

    experts: Tensor
    """``[pairs]`` int64."""
    shares: Tensor
    """``[pairs]``: by what an expert's result is multiplied."""
    tokens: Tensor
    """``[pairs]`` int64, going up."""
    begins: Tensor
    """``[n]`` int64: the first pair of each token, or where it would be."""


def pieces_of(pairs: Pairs, sizes: Sequence[int]) -> list[Pairs]:
    """Those of so many tokens after one another, each piece counting its own from 0."""
    if len(sizes) == 1:
        return [pairs]
    ends = [*accumulate(sizes, initial=0)]
    behind = pairs.begins.new_tensor([len(pairs.experts)])
    firsts = torch.cat((pairs.begins, behind))[ends].tolist()
    counts = [end - first for first, end in pairwise(firsts)]
    parts = (torch.split(each, counts) for each in pairs[:3])
    begins = torch.split(pairs.begins, list(sizes))
    return [
        Pairs(experts, shares, tokens - end, own - first)
        for experts, shares, tokens, own, end, first in zip(
            *parts, begins, ends[:-1], firsts[:-1], strict=True
        )
    ]


def all_choices(chosen: Routed) -> Pairs:
    """Every choice of ``n`` tokens."""
    tokens, top_k = chosen.experts.shape
    places = torch.arange(tokens, device=chosen.experts.device)
    of_each = places.repeat_interleave(top_k, output_size=tokens * top_k)
    return Pairs(chosen.experts.flatten(), chosen.shares.flatten(), of_each, places * top_k)


def earliest(chosen: Routed, *, samples: int, room: int, experts_in_all: int) -> Pairs:
    """Of the tokens of each sample, one after the other, those whose choice an expert has ``room``
    for. A later token never takes an earlier one's place, so no token knows of later ones."""
    every = all_choices(chosen)
    if not len(every.tokens):
        return every
    sample = every.tokens // (len(every.begins) // samples)
    queue = sample * experts_in_all + every.experts
    order = torch.argsort(queue, stable=True)
    sizes = torch.bincount(queue, minlength=samples * experts_in_all)
    firsts = sizes.cumsum(0) - sizes
    places = torch.arange(len(queue), device=queue.device) - firsts[queue[order]]
    has_room = torch.empty_like(queue, dtype=torch.bool)
    has_room[order] = places < room
    of_each = has_room.view(chosen.experts.shape).sum(1)
    experts, shares, tokens = (x[has_room] for x in every[:3])
    return Pairs(experts, shares, tokens, of_each.cumsum(0) - of_each)


def of_experts(scores: Tensor, spec: ExpertsSpec, *, room: int) -> Pairs:
    """Of ``scores`` ``[samples, seq, experts]`` each expert takes the ``room`` greatest of every
    sample (expert choice, arXiv 2202.09368, with a sample for a batch). Of those that are equal,
    but for rounding, it takes the earliest: documents may begin with the same token."""
    steps = (scores.detach() * STEPS).round()
    best = steps.sort(dim=1, descending=True, stable=True).indices[:, :room]
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, value=True)
    shares = divided(scores.masked_fill(~is_chosen, 0.0), spec).flatten(0, 1)
    tokens, experts = is_chosen.flatten(0, 1).nonzero(as_tuple=True)
    of_each = is_chosen.flatten(0, 1).sum(1)
    return Pairs(experts, shares[tokens, experts], tokens, of_each.cumsum(0) - of_each)
