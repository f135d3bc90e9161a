"""What a search comes back with: plans, and why the others are not among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.cost.memory import Memory
from weft.plan.plan import Plan
from weft.simulate.step import StepTime

Kind = Literal["shape", "memory", "bound", "slower", "limit"]
"""It cannot be laid out; does not fit; its bound says that another is faster; another does the same
no slower; the space is too large, and its bound is not among the most promising."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan, and what it is predicted to take."""

    name: str
    """In words: ``pp 2 x (dp 8) on 16 A100-SXM4-80GB``."""
    plan: Plan
    cluster: ClusterView
    """The chips that the plan uses: its ranks are numbered over them."""
    time: StepTime
    memory: Mapping[int, Memory]
    """By rank."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate is out."""

    kind: Kind
    words: str
    """With the numbers that prove it."""


@dataclass(slots=True)
class Pruned:
    """Every candidate that was not simulated, by reason. Counts, and some examples in words."""

    counts: dict[Kind, int] = field(default_factory=dict)
    examples: dict[Kind, list[str]] = field(default_factory=dict)
    """Kind -> the first few, each with its candidate."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, kind: Kind, words: str, count: int = 1) -> None:
        """So many candidates are out for a reason."""
        if not count:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        if self.wants(kind):
            self.examples.setdefault(kind, []).append(words)

    def wants(self, kind: Kind) -> bool:
        """Another example would be kept."""
        return len(self.examples.get(kind, ())) < MOST_EXAMPLES


MOST_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan, the next best that are really different, and what became of the rest."""

    best: Candidate
    others: tuple[Candidate, ...]
    considered: int
    """Candidates in all: those that were simulated, and those that were pruned."""
    simulated: int = 0
    pruned: Pruned
    seconds: float
    """That the search took."""


class NoPlan(ConfigError):  # noqa: N818 - a finding, and the name that callers read
    """Nothing fits: what is short by how much, where, and the smallest change that would do."""
