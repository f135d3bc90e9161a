"""Experts on other ranks, for a job in which some have more tokens than others.

The launcher reads how many tokens went to each expert, in the lines of the run's metrics, and lets
the job move where that pays: what ranks hold is boxes of the same parameters under any plan, so
no loss depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.config.errors import ConfigErrors
from weft.elastic.failure import Epoch
from weft.elastic.replan import Replans
from weft.plan.plan import Plan
from weft.planner.expert_places import slowest_part, with_places
from weft.report.events import EventLog

TAIL_BYTES = 1 << 22
"""Of the metrics, that are read again."""


class Loads:
    """The launcher's side.

    Args:
        every: Steps from one look to the next, and so between two moves.
        copies: Of experts of a layer, that ranks may have beside one of each.
        tell: Says a line to the person who started the job.
    """

    def __init__(
        self, replans: Replans, every: int, tell: Callable[[str], None], *, copies: int = 0
    ) -> None:
        self._replans, self._every, self._tell = replans, every, tell
        self._copies = copies
        self._metrics = replans.job.out / "metrics.jsonl"
        self._events = EventLog(replans.job.out, began=replans.job.began, watches=True)
        self._looked: int | None = None
        """At which step."""
        self._size = -1
        self._loads: dict[int, list[int]] = {}
        self._plan: Plan | None = None
        self._of: Plan | None = None
        """The plan that the other one is better than."""

    def wanted(self) -> bool:
        """The ranks are to come to the door for a plan in which experts are elsewhere."""
        if self._plan is None:
            self._look()
        return self._plan is not None

    def epoch(self) -> Epoch:
        """They have come: what they do next."""
        plan, self._plan = self._plan, None
        before = self._replans.job.plan
        seats = None
        if plan is not None and self._of == before:
            try:
                self._replans.under(plan)
                seats = self._replans.seats
                self._say(before, plan)
            except ConfigErrors as errors:  # ranks were lost meanwhile
                self._tell(f"experts stay where they are: {errors.errors[0]}")
        job = self._replans.job
        return Epoch((job,), job.plan.world_size, seats)

    def _look(self) -> None:
        """At what came since the last look, where that is enough."""
        size = self._metrics.stat().st_size if self._metrics.exists() else -1
        if size == self._size:
            return
        self._size = size
        found = recent(self._metrics)
        step = max(found, default=0)
        if self._looked is None:
            self._looked = min(found, default=0)
        if step - self._looked < self._every or step >= self._replans.job.last_step:
            return
        since, self._looked = self._looked, step
        self._of = self._replans.job.plan
        self._loads = added(each for at, each in found.items() if at > since)
        replans = self._replans
        plan = with_places(self._of, replans.spec, self._loads, replans.paces, copies=self._copies)
        self._plan = None if plan == self._of else plan

    def _say(self, before: Plan, plan: Plan) -> None:
        parts = [
            slowest_part(each, self._replans.spec, self._loads, self._replans.paces)
            for each in (before, plan)
        ]
        said = f"experts have changed places: the slowest rank computes {parts[1]:.2f} of the mean "
        said += f"of their tokens, {parts[0]:.2f} before"
        facts = {"before": parts[0], "now": parts[1]}
        self._events.write("balance", said, step=self._looked, facts=facts)
        self._tell(f"after step {self._looked}: {said}")


def recent(metrics: Path) -> dict[int, Mapping[int, Sequence[int]]]:
    """By step, of the last lines that tell it, tokens by layer and expert."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    return dict(filter(None, map(_told, lines)))


def _told(line: bytes) -> tuple[int, Mapping[int, Sequence[int]]] | None:
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        record = json.loads(line)
        loads = record["tokens_per_expert"]
        return int(record["step"]), {int(layer): load for layer, load in loads.items()}
    return None


def added(several: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """By layer and expert, of several steps."""
    total: dict[int, list[int]] = {}
    for loads in several:
        for layer, load in loads.items():
            before = total.get(layer, [0] * len(load))
            total[layer] = [a + b for a, b in zip(before, load, strict=True)]
    return total
