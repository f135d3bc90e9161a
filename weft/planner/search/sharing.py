"""How pipelines side by side share the samples of a step: so that all end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import comb, inf
from typing import NamedTuple

from weft.plan.tiling import split_by_weight
from weft.planner.search.choice import Timed
from weft.planner.search.group import UNCUT, Group, Kept

MOST_ROUNDS = 3
MOST_MOVES = 64
"""Of samples from one pipeline to another, after each round."""
FEW_SHARES = 40
"""Ways to divide the samples among pipelines up to which all are tried."""
LEFT = "ways to share the samples: less promising than those that were looked at"


class Beside(NamedTuple):
    """Pipelines through these, side by side."""

    groups: Sequence[Group]
    weights: Sequence[int]
    """About how fast each is."""
    per_sample_s: Sequence[float]
    """Of each, at least."""
    kept: Kept
    missed: set[tuple[Group, Kept]]
    """Those that were not worth it when they were last asked, whatever was beside them."""


def shared(
    beside: Beside, samples: int, enough: Callable[[], float], worth: float
) -> Iterator[list[Timed]]:
    """Pipelines for all samples of a step: by speed, then until none would give a sample to
    another; if there are few ways to share, all of them.

    Args:
        enough: Seconds up to which a pipeline is looked for, as much as is known by then.
        worth: And a share better than a first one. Where it is known, pipelines are not looked for
            beside one that takes longer.
    """
    trial = _Trial(beside, enough, worth)
    shares = by_speed(samples, beside.weights)
    while tuple(shares) not in trial.tried and len(trial.tried) < MOST_ROUNDS:
        timed = trial.of(shares)
        if timed:
            yield timed
        if longest(timed) >= worth:
            break
        shares = balanced(timed)
        if even := evened(beside.groups, timed, shares):
            yield even
        shares = [each.line.samples for each in even] or shares
    if comb(samples - 1, len(beside.groups) - 1) <= FEW_SHARES:
        yield from trial.faster(samples)


class _Trial:
    """Shares that were tried, each once."""

    def __init__(self, beside: Beside, enough: Callable[[], float], worth: float) -> None:
        self.beside, self.enough, self.worth = beside, enough, worth
        self.tried: dict[tuple[int, ...], list[Timed]] = {}
        self._best = cache(self._best_of)

    def _best_of(self, number: int, share: int) -> Timed | None:
        uncut = UNCUT if self.worth == inf else 0
        return self.beside.groups[number].best(share, self.enough(), self.beside.kept, uncut=uncut)

    def of(self, shares: Sequence[int]) -> list[Timed]:
        """The fastest pipelines with these; none where one has none, or none that is worth it."""
        asked = [] if self.worth == inf else self._slowest_first()
        enough = all(self._is_worth(number, shares[number]) for number in asked)
        found = every_one([self._best(*each) for each in enumerate(shares)]) if enough else []
        return self.tried.setdefault(tuple(shares), found)

    def _slowest_first(self) -> list[int]:
        """But before all others those that were not worth it before."""
        groups, weights, _, kept, missed = self.beside
        fine = [(group, kept) not in missed for group in groups]
        return sorted(range(len(groups)), key=lambda number: (fine[number], weights[number]))

    def _is_worth(self, number: int, share: int) -> bool:
        timed, key = self._best(number, share), (self.beside.groups[number], self.beside.kept)
        is_worth = timed is not None and timed.seconds < self.worth
        (self.beside.missed.discard if is_worth else self.beside.missed.add)(key)
        return is_worth

    def faster(self, samples: int) -> Iterator[list[Timed]]:
        """Of all other shares, what is faster than is enough: the most promising first, all of them
        with as much effort as there is for one."""
        per_sample_s, first = self.beside.per_sample_s, self.beside.groups[0]
        least = {
            shares: max(s * n for s, n in zip(per_sample_s, shares, strict=True))
            for shares in every_share(samples, len(per_sample_s))
            if shares not in self.tried
        }
        spent = first.spent(self.beside.kept)
        for looked, shares in enumerate(sorted(least, key=least.__getitem__)):
            most = self.enough()
            if least[shares] >= most:
                break
            if spent():
                first.ledger.leave(len(least) - looked, LEFT)
                break
            found = list[Timed]()
            for number, share in enumerate(shares):
                timed = self._best(number, share)
                if timed is None or timed.seconds >= most:
                    break
                found.append(timed)
            else:
                yield found


def by_speed(total: int, weights: Sequence[int]) -> list[int]:
    """Shares to begin with, one at least."""
    shares = [max(1, share) for share in split_by_weight(total, weights)]
    for _ in range(sum(shares) - total):
        shares[shares.index(max(shares))] -= 1
    return shares


def balanced(chosen: Sequence[Timed]) -> list[int]:
    """Shares with which pipelines that are otherwise decided would take the least time, if a sample
    more took as long as a full pipeline does for it."""
    lines = [timed.line for timed in chosen]
    each = [
        timed.seconds / (line.samples + line.micro * (line.num_meshes - 1))
        for timed, line in zip(chosen, lines, strict=True)
    ]
    rest = [t.seconds - t.line.samples * s for t, s in zip(chosen, each, strict=True)]
    shares = [1] * len(chosen)
    for _ in range(sum(line.samples for line in lines) - len(chosen)):
        after = [r + (n + 1) * s for r, n, s in zip(rest, shares, each, strict=True)]
        shares[after.index(min(after))] += 1
    return shares


def evened(groups: Sequence[Group], chosen: Sequence[Timed], shares: Sequence[int]) -> list[Timed]:
    """The same pipelines with those shares, or with others where those would take longer: samples
    go from the slowest to another as long as that ends sooner.

    As many go as make a difference: ranks of a mesh divide the last microbatch evenly. None where
    some pipeline has not the room, or less than a microbatch.
    """
    again = cache(lambda number, share: groups[number].again(chosen[number].line, share))
    found = every_one([again(number, share) for number, share in enumerate(shares)])

    def is_faster(number: int, fewer: int) -> bool:
        """With so many samples less; else nothing is to be had from where they go."""
        with_less = again(number, found[number].line.samples - fewer)
        return with_less is not None and with_less.seconds < found[number].seconds

    for _ in range(MOST_MOVES if found else 0):
        slowest = max(range(len(found)), key=lambda number: found[number].seconds)
        moves = [
            [
                again(number, each.line.samples + many * ((number == taker) - (number == slowest)))
                for number, each in enumerate(found)
            ]
            for taker in range(len(found))
            for many in {1, _ways(found[slowest]), _ways(found[taker])}
            if taker != slowest and is_faster(slowest, many)
        ]
        best = min(filter(None, map(every_one, moves)), key=longest, default=[])
        if not best or longest(best) >= longest(found):
            break
        found = best
    return found


def every_share(total: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide samples, with one at least for each."""
    for cuts in combinations(range(1, total), groups - 1):
        ends = (0, *cuts, total)
        yield tuple(high - low for low, high in pairwise(ends))


def every_one(each: Sequence[Timed | None]) -> list[Timed]:
    """All of them, or none."""
    found = [timed for timed in each if timed is not None]
    return found if len(found) == len(each) else []


def _ways(timed: Timed) -> int:
    """Samples that a mesh computes at a time, at least."""
    return min(section.ways for section in timed.line.sections)


def longest(chosen: Sequence[Timed]) -> float:
    """Seconds of those side by side; no end of none."""
    return max((timed.seconds for timed in chosen), default=inf)
