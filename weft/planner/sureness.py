"""How sure a plan's forecast is, and which of plans that take as long is the surest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.cluster.view import ClusterView
from weft.cost.interval import PART, Blind, Interval, interval
from weft.cost.profile import Profile
from weft.cost.rates import OTHER, chip_class
from weft.planner.search import Candidate, Found
from weft.simulate.step import Knowledge

TIED = 0.01
"""Relative; plans whose steps differ by less take as long, as far as anyone can tell."""


@dataclass(frozen=True, slots=True)
class Sureness:
    """What is known of a plan's chips."""

    unmeasured: tuple[str, ...]
    """Chips on which Weft itself was not measured."""
    unheard: tuple[str, ...]
    """Of those, chips of whose kind no run was measured either."""
    parts: bool = False
    """Some are parts of a core that was measured."""
    other_cores: float = 0.0
    """That worked for others meanwhile."""

    @staticmethod
    def of(cluster: ClusterView, knowledge: Knowledge) -> Sureness:
        """``cluster``: the chips that the plan uses."""
        chips = {pool.chip.name: pool.chip for pool in cluster.pools}
        own = knowledge.chips
        measured = {name for name, cost in own.items() if isinstance(cost, Profile)}
        measured |= set(knowledge.hardware)
        left = [chip for name, chip in chips.items() if name not in measured]
        unheard = (c.name for c in left if c.name not in own and chip_class(c) == OTHER)
        costs = [own.get(name) for name in chips]
        costs += [knowledge.hardware[name].chip for name in chips if name in knowledge.hardware]
        profiles = [cost for cost in costs if isinstance(cost, Profile)]
        return Sureness(
            tuple(chip.name for chip in left),
            tuple(unheard),
            any(profile.speed < 1 for profile in profiles),
            max((profile.other_cores for profile in profiles), default=0.0),
        )

    @property
    def blind(self) -> Blind:
        """As ``interval`` asks for it."""
        if self.unheard:
            return "chip"
        if self.unmeasured:
            return "software"
        return "part" if self.parts else "profiled"

    def step(self, seconds: float) -> Interval:
        """Of a step; what was measured beside other work tells no more of it than data sheets."""
        blind = "software" if self.other_cores and not self.unmeasured else self.blind
        return interval("time", seconds, blind)

    def memory(self, num_bytes: float) -> Interval:
        """Of a rank."""
        return interval("memory", num_bytes, self.blind)

    @property
    def words(self) -> str:
        """Why it is as wide as it is."""
        if not self.unmeasured:
            words = f"measured on this very hardware{', parts of which take turns' * self.parts}"
            busy = f", while {self.other_cores:.1f} of its cores worked for others"
            return words + busy * (self.other_cores > 0)
        measured = f"Weft was not measured on {' and '.join(self.unmeasured)}"
        if not self.unheard:
            return measured
        return f"{measured}, and no run on {' and '.join(self.unheard)} is known"


def surest(found: Found, knowledge: Knowledge) -> tuple[Found, str]:
    """What was found with the surest first of the plans that take as long as the best, and why it
    is; nothing where it was first."""
    best, *others = found.best, *found.others
    tied = [other for other in others if other.time.step_s < (1 + TIED) * best.time.step_s]

    def width(candidate: Candidate) -> float:
        sure = Sureness.of(candidate.cluster, knowledge)
        return sure.step(1.0).high

    chosen = min((best, *tied), key=width)
    if chosen is best:
        return found, ""
    rest = tuple(each for each in (best, *others) if each is not chosen)
    longer = chosen.time.step_s / best.time.step_s - 1
    words = (
        f"chosen because it is surer: {PART:.0%} of such steps take up to {width(chosen):.2f} "
        f"times as long as predicted, of {best.name}, predicted {longer:.1%} less, up to "
        f"{width(best):.2f} times"
    )
    return replace(found, best=chosen, others=rest), words
