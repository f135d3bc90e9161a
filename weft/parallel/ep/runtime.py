"""Expert parallelism's form of the one kind of module that it changes."""

from __future__ import annotations

from torch import nn

from weft.nn.experts.feed_forward import Experts
from weft.parallel.ep.exchange import Exchange
from weft.parallel.runtime import Runtime, Sum
from weft.parallel.split_experts import SplitExperts


def elsewhere(experts: nn.Module, total: Sum) -> nn.Module:
    """Let tokens visit experts of all ranks; where each has parts of experts, ranks with the same
    parts."""
    inner = experts.experts if isinstance(experts, SplitExperts) else experts
    assert isinstance(inner, Experts), f"{experts} has no experts"
    inner.visits, inner.pieces = Exchange(total), total.group.pieces
    return experts


RUNTIME = Runtime({}, {Experts: elsewhere, SplitExperts: elsewhere})
