"""Goes on with the ranks that are left, under a plan for them: their state moves by what each box
of a checkpoint or of a copy in memory is, whatever plan made it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.elastic.failure import ANEW
from weft.plan.plan import Plan
from weft.resolve.left import cards_of, plan_for_left
from weft.resolve.peaks import peaks_here
from weft.resolve.prediction import PREDICTION_FILE, Prediction, predict_run
from weft.resolve.queues import queues_for, refuse_few_queues
from weft.resolve.resolve import Resolved
from weft.train.job import Job
from weft.train.run_list import plan_in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """A job that goes on under another plan."""

    job: Job
    seats: tuple[int, ...]
    """For each rank the one that its process was before, or ``ANEW``."""
    words: str
    """From which plan to which, and why."""


class Replans:
    """Knows what a job was asked to be, and plans it again.

    Args:
        resolved: With the plan that it begins with.
    """

    def __init__(self, loaded: Loaded, resolved: Resolved) -> None:
        self._loaded = replace(loaded, config=resolved.config)
        self._resolved = resolved
        plan = resolved.plan
        self._queues = tuple(queues_for(plan, rank) for rank in range(plan.world_size))
        """Of the device of each rank, which its process has for good."""

    def without(self, job: Job, lost: Sequence[int]) -> Replanned:
        """The job on the ranks that are left.

        Raises:
            ConfigErrors: there is no plan for those.
        """
        before = job.plan
        left = [rank for rank in range(before.world_size) if rank not in lost]
        found = plan_for_left(self._loaded, self._resolved, left)
        plan = found.resolved.plan
        seats = self._seats(plan, found.seats)
        self._resolved = found.resolved
        cards = job.cards or cards_of(before)
        prediction = predict_run(found.resolved)
        files = {
            "plan.json": plan.to_json(),
            "cluster.json": found.resolved.cluster.to_json(),
            PREDICTION_FILE: prediction.to_json(),
        }
        after = replace(
            job,
            plan=plan,
            threads=found.resolved.threads,
            cards=tuple(cards[seat] for seat in found.seats),
            prediction=prediction,
            peaks=peaks_here(found.resolved, range(plan.world_size)),
            files={**job.files, **files},
        )
        words = f"{plan_in_words(plan)}, instead of {plan_in_words(before)}; {found.why}"
        words += _beside(job.prediction, prediction)
        return Replanned(job=after, seats=seats, words=words)

    def _seats(self, plan: Plan, taken: Sequence[int]) -> tuple[int, ...]:
        """A process whose device has too few queues for the plan is another one."""
        try:
            refuse_few_queues(plan, os.environ)
        except ConfigError as error:
            raise self._loaded.place(error) from error
        needed = [queues_for(plan, rank) for rank in range(plan.world_size)]
        has = [self._queues[seat] for seat in taken]
        pairs = list(zip(needed, has, strict=True))
        self._queues = tuple(max(pair) for pair in pairs)
        return tuple(
            ANEW if wants > got else seat for seat, (wants, got) in zip(taken, pairs, strict=True)
        )


def _beside(before: Prediction | None, after: Prediction) -> str:
    """Of the time of a step, where both are known."""
    was = None if before is None else before.quantities.step_time_s
    now = after.quantities.step_time_s
    if was is None or now is None:
        return ""
    return f"; a step is predicted to take {now:.3g} s instead of {was:.3g} s"
