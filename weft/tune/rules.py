"""What a trial rules out for certain: rules that hold however wrong every prediction is.

They take for true only that time grows with what a plan does, and memory with what a rank holds:
that a plan which does no less of anything takes no less time, and that a chip which ran out of
memory has too little for more of the same. So they never drop the fastest plan that fits, where
another is not as fast (``tests/tune/test_tune_rules.py``, on random such models). Plans that differ
in layers or meshes are compared by what they do and hold, never by names of their settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.tune.candidate import Candidate, Holding


@dataclass(frozen=True, slots=True)
class Short:
    """A rank that ran out of memory."""

    trial: str
    """Of which plan."""
    holding: Holding
    """Its own, as predicted."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan that was measured."""

    trial: str
    work: Mapping[str, float]


def no_less(more: Mapping[str, float], less: Mapping[str, float]) -> bool:
    """Of anything; what is not named is nothing."""
    return all(more.get(name, 0.0) >= amount for name, amount in less.items())


def why_short(candidate: Candidate, shorts: Iterable[Short]) -> str:
    """Why a plan cannot fit, in words; empty where it may."""
    for short in shorts:
        lacking = short.holding
        for holding in candidate.memory:
            is_same = holding.kind == lacking.kind and holding.limit_bytes <= lacking.limit_bytes
            if is_same and no_less(holding.num_bytes, lacking.num_bytes):
                return (
                    f"cannot fit: it needs no less of anything on {holding.kind} than "
                    f"{short.trial}, which ran out of memory there"
                )
    return ""


def why_slower(candidate: Candidate, ran: Iterable[Ran]) -> str:
    """Why a plan cannot be faster than one that was measured, in words; empty where it may."""
    for other in ran:
        if no_less(candidate.work, other.work):
            return f"cannot be faster: it does no less of anything than {other.trial}"
    return ""
