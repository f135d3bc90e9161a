"""What a search comes back with: plans, and why the others are not among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.cost.memory import Memory
from weft.plan.plan import Plan
from weft.simulate.step import StepTime

ReasonKind = Literal["shape", "axis", "unrun", "memory", "bound", "slower", "limit"]
"""It cannot be laid out; an axis has no way to divide the model; this version cannot run it; it
does not fit; its bound says that another is faster; another does the same no slower; the space is
too large, and its bound is not among the most promising."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan, and what it is predicted to take."""

    name: str
    """In words; see ``weft.planner.naming``."""
    plan: Plan
    cluster: ClusterView
    """The chips that the plan uses: its ranks are numbered over them."""
    time: StepTime
    memory: Mapping[int, Memory]
    """By rank."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate is out."""

    kind: ReasonKind
    words: str
    """With the numbers that prove it."""


MOST_EXAMPLES = 5

MEANING: dict[ReasonKind, str] = {
    "shape": "cannot be laid out: nodes not filled evenly, or unlike levels of ZeRO side by side",
    "axis": "divides the model along an axis that has no way to compute its modules in parts",
    "unrun": "this version cannot run it on such chips, and only what it can was asked for",
    "memory": "does not fit the chips' memory, with any layers on its meshes",
    "bound": "takes at least as long as a plan that is known, whatever is still open",
    "slower": "another level of ZeRO takes no longer and needs no more memory",
    "limit": "not looked at: its bound is not among the most promising of a space too large",
}


@dataclass(slots=True)
class PrunedFor:
    """All candidates that are out for one reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few, in words."""
    bounds: tuple[float, float] | None = None
    """Seconds that they take at least, from the least to the most, where that was told."""


@dataclass(slots=True)
class Pruned:
    """Every candidate that was not simulated, by reason."""

    reasons: dict[ReasonKind, PrunedFor] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(reason.count for reason in self.reasons.values())

    def add(
        self, kind: ReasonKind, words: str | Callable[[], str], count: int = 1, *bounds: float
    ) -> None:
        """So many candidates are out for a reason.

        Args:
            words: An example, or what says one, asked while there are few.
            bounds: Seconds that some take at least.
        """
        if not count:
            return
        reason = self.reasons.setdefault(kind, PrunedFor())
        reason.count += count
        if len(reason.examples) < MOST_EXAMPLES:
            reason.examples.append(words if isinstance(words, str) else words())
        if bounds:
            every = *bounds, *(reason.bounds or ())
            reason.bounds = min(every), max(every)

    def add_all(self, other: Pruned) -> None:
        """Those of another search."""
        for kind, out in other.reasons.items():
            more = out.examples or [""]
            self.add(kind, more[0], out.count, *(out.bounds or ()))

    def most_first(self) -> list[tuple[ReasonKind, PrunedFor]]:
        """The most frequent reason first."""
        return sorted(self.reasons.items(), key=lambda item: -item[1].count)


ENDED_EARLY = "The search was ended early: with more time there may be a faster plan."


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan, the next best that are really different, and what became of the rest."""

    best: Candidate
    others: tuple[Candidate, ...]
    considered: int
    """Candidates in all: those that were simulated, and those that were pruned."""
    simulated: int = 0
    pruned: Pruned
    is_cut_short: bool = False
    """It was ended before all was looked at."""
    bound_s: float = 0.0
    """No plan takes less, by the same costs, with whatever is refined in it; see ``Relaxed``."""
    seconds: float
    """That the search took."""

    @property
    def gap(self) -> float | None:
        """Part of the bound by which the best may be slower than a plan that was not found; None
        where there is no bound."""
        return self.best.time.step_s / self.bound_s - 1 if self.bound_s else None

    @property
    def exhausts(self) -> bool:
        """Every plan of whole layers in a schedule's usual order was weighed, or ruled out by what
        it needs or takes at least."""
        return "limit" not in self.pruned.reasons


class NoPlan(ConfigError):  # noqa: N818 - a finding, and the name that callers read
    """Nothing fits: what is short by how much, where, and the smallest change that would do."""


def together(found: Sequence[Found]) -> Found:
    """What searches of the same chips found, each in plans that the others did not look at."""
    every = sorted((c for each in found for c in (each.best, *each.others)), key=_step_s)
    pruned = Pruned()
    for each in found:
        pruned.add_all(each.pruned)
    return Found(
        best=every[0],
        others=tuple(every[1:]),
        considered=sum(each.considered for each in found),
        simulated=sum(each.simulated for each in found),
        pruned=pruned,
        is_cut_short=any(each.is_cut_short for each in found),
        bound_s=min(each.bound_s for each in found),
        seconds=sum(each.seconds for each in found),
    )


def _step_s(candidate: Candidate) -> float:
    return candidate.time.step_s
