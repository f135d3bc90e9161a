"""Modules whose positions are divided among ranks: the same results as with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from weft.axes.cp.axis import AXIS
from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.nn.attention import Attention
from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.experts.feed_forward import Balance, LargeLogits
from weft.nn.full_attention import full_attention
from weft.nn.fused_parts import kernel_for
from weft.nn.latent_attention import LatentAttention
from weft.nn.losses import LinearCrossEntropy
from weft.parallel.cp.fused_ring import FusedRing
from weft.parallel.cp.gathered import Gathered
from weft.parallel.cp.ring import Ring
from weft.parallel.cp.rows import Rows
from weft.parallel.cp.ulysses import Attend, Ulysses, among_groups
from weft.parallel.division import Division, there_and_back
from weft.parallel.runtime import AxisGroup, Lying, SplitForm, Sum
from weft.parallel.split_vocab import VocabCrossEntropy
from weft.plan.layout import Shard

_KNOWN = (causal_attention, full_attention)


def own_queries(attention: nn.Module, total: Sum) -> nn.Module:
    """Let attention compute this rank's queries; documents are of whole samples.

    Raises:
        ConfigError: attention was given a core of its own, which may see other keys.
    """
    assert isinstance(attention, Attention | LatentAttention), f"{attention} has no core"
    if attention.core.call not in _KNOWN:
        whose = f"that of {type(attention).__name__}"
        expected = " or ".join(each.__name__ for each in _KNOWN) + " where cp divides tokens"
        raise ConfigError("attention.core", whose, expected, AXIS.otherwise)
    ways = total.group.near_ways
    core: Attend = attention.core.call
    if ways < total.group.size:
        core = _Core(among_groups(total), causal=attention.causal)
    attention.core.call = core if ways == 1 else Ulysses(total, core)
    return attention


class _Core:
    """Keys go round where attention is computed in our own blocks, in whole rows of scores or by
    kernels that give logarithms of sums, and are gathered for those that do not."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self._in_rows = total.group.scores == "rows"
        self._ring: Attend = Ring(total, causal=causal)
        if self._in_rows:
            self._ring = Rows(total, causal=causal)
        self._fused = FusedRing(total, causal=causal)
        self._gathered = Gathered(total, causal=causal)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        if not len(q):
            return causal_attention(q, k, v, packed)
        attend = self._for(q, v)
        by_work = packed is not None and packed.places is not None
        if torch.compiler.is_compiling() and (attend is not self._gathered or by_work):
            from weft.parallel.cp import uncompiled

            mixed: Tensor = uncompiled.attention(attend, q, k, v, packed)
            return mixed
        return attend(q, k, v, packed)

    def _for(self, q: Tensor, v: Tensor) -> Attend:
        if q.device.type == HOST or self._in_rows:
            return self._ring
        return self._gathered if kernel_for(q, v) is None else self._fused


class OwnTargets(nn.Module):
    """A loss of this rank's positions, summed over ranks: all have the sum, and each the gradient
    of its own term."""

    def __init__(self, loss: nn.Module, total: Sum) -> None:
        super().__init__()
        self.loss = loss
        self._own = Division(total.group, Lying(Shard(1), total.parts)).taken
        self._added = partial(_added, total.group)

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """``hidden`` is of own positions, ``targets`` and ``weights`` ``[batch, seq]`` of all."""
        term = self.loss(hidden, weight, self._own(targets), self._own(weights))
        return there_and_back(term, self._added, _same)


class OwnTerm(nn.Module):
    """Likewise what is added to the loss for this rank's positions."""

    def __init__(self, loss: nn.Module, total: Sum) -> None:
        super().__init__()
        self.loss = loss
        self._added = partial(_added, total.group)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, own seq, ..]`` to a scalar."""
        return there_and_back(self.loss(x), self._added, _same)


class OwnTokens(nn.Module):
    """Likewise what is added for unequal loads: these are of whole samples."""

    def __init__(self, loss: nn.Module, total: Sum) -> None:
        super().__init__()
        self.loss = loss
        self._added = partial(_added, total.group)

    def forward(self, scores: Tensor, loads: Tensor) -> Tensor:
        """``[batch, own seq, experts]``, and ``[batch, experts]`` of own positions, to a scalar."""
        loads = there_and_back(loads, self._added, _same)
        return there_and_back(self.loss(scores, loads), self._added, _same)


def _added(group: AxisGroup, term: Tensor) -> Tensor:
    total = term.clone()
    group.comm.all_reduce(total, name="losses", group=group.ranks)
    return total


def _same(grad: Tensor) -> Tensor:
    return grad


SPLIT_FORMS: Mapping[type[nn.Module], SplitForm] = {
    Attention: own_queries,
    LatentAttention: own_queries,
    Balance: OwnTokens,
    LargeLogits: OwnTerm,
    LinearCrossEntropy: OwnTargets,
    VocabCrossEntropy: OwnTargets,
}
