"""Goes on under another plan: on the ranks that are left, or as somebody asks. State moves by what
each box of a checkpoint or of a copy in memory is, whatever plan made it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from weft.checkpoint.agent.lease import Lease, agent_address
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.elastic.failure import ANEW
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.resolve.left import asking_of, cards_of, plan_for_left, with_chips
from weft.resolve.memory_here import refuse_too_large
from weft.resolve.paced import Better, better_plan
from weft.resolve.peaks import peaks_here
from weft.resolve.prediction import PREDICTION_FILE, Prediction, predict_run
from weft.resolve.queues import queues_for, refuse_few_queues
from weft.resolve.resolve import Resolved, is_counted, resolve
from weft.train.job import Job
from weft.train.run_list import change_in_words


class Replans:
    """A job whose plan may change while its processes stay.

    Args:
        resolved: With the plan that it begins with.
    """

    def __init__(self, loaded: Loaded, resolved: Resolved, job: Job) -> None:
        self.job = job
        """Under the plan that it has now."""
        self.seats: tuple[int, ...] = ()
        """For each rank the one that its process was under the plan before, or ``ANEW``."""
        self._loaded = replace(loaded, config=resolved.config)
        self._machine = resolved.cluster
        self._resolved = resolved
        plan = resolved.plan
        self._cards = cards_of(plan)
        self._times = ""
        self._lease = Lease()
        """State in this machine's memory outlives the processes that have it, until others do."""
        self.paces: tuple[float, ...] = ()
        """How many times as long ranks compute as their chips' rates say, as far as the job's
        prediction counts with it; empty: as long."""
        self._queues = tuple(queues_for(plan, rank) for rank in range(plan.world_size))
        """Of the device of each rank, which its process has for good."""

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        return self._resolved.spec

    @property
    def num_parameters(self) -> int:
        return self._resolved.num_parameters

    def without(self, lost: Sequence[int]) -> str:
        """Go on with the ranks that are left; from which plan to which, and why.

        Raises:
            ConfigErrors: there is no plan for those.
        """
        left = [rank for rank in range(self.job.plan.world_size) if rank not in lost]
        found = plan_for_left(self._loaded, self._resolved, left)
        return f"{self._take(found.resolved, found.seats)}; {found.why}{self._times}"

    def under(self, plan: Plan) -> str:
        """Go on with all ranks as far as the plan has work for them, and with more where it has
        more; from which plan to which.

        Raises:
            ConfigErrors: the plan does not fit the model, the batch or this machine.
        """
        resolved = resolve(self._loaded, self._machine, plan=plan, why=["asked for"])
        refuse_move(self._loaded, resolved, self.job.plan)
        return f"{self._take(resolved, self._seats_for(plan))}{self._times}"

    def better(self, paces: Sequence[float]) -> Better:
        """The plan for ranks that compute so many times as long as the job's prediction says.

        Raises:
            ConfigError: there is none.
        """
        before = self.paces or (1.0,) * len(paces)
        both = zip(before, paces, strict=True)
        return better_plan(self._loaded, self._resolved, [was * now for was, now in both])

    def at_paces(self, better: Better) -> str:
        """Go on with all ranks under the plan for what they were measured at; from which plan to
        which.

        Raises:
            ConfigErrors: the plan does not fit this machine.
        """
        loaded = asking_of(self._loaded, better.plan)
        resolved = resolve(loaded, self._machine, plan=better.plan, why=["planned again"])
        refuse_move(self._loaded, resolved, self.job.plan)
        words = self._take(resolved, better.seats, better)
        return f"{words}{_in_seconds(better.now_s, better.step_s)}"

    def check(self, plan: Plan) -> None:
        """Raises ConfigErrors: the job cannot go on under it."""
        resolved = resolve(self._loaded, self._machine, plan=plan, why=["asked for"])
        refuse_move(self._loaded, resolved, self.job.plan)

    def _seats_for(self, plan: Plan) -> tuple[int, ...]:
        """Each rank of a plan takes over the first process on its family that nobody has."""
        free = dict(enumerate(self.job.plan.devices))
        seats = []
        for device in plan.devices:
            seat = next((rank for rank, its in free.items() if its == device), ANEW)
            free.pop(seat, None)
            seats.append(seat)
        return tuple(seats)

    def _cards_for(self, plan: Plan, seats: Sequence[int]) -> tuple[int, ...]:
        """A process stays on its card, and new ones take the first that are free."""
        cards: list[int] = []
        taken = {(plan.devices[r], self._cards[s]) for r, s in enumerate(seats) if s != ANEW}
        for device, seat in zip(plan.devices, seats, strict=True):
            free = (card for card in count() if (device, card) not in taken)
            cards.append(self._cards[seat] if seat != ANEW else next(free))
            taken.add((device, cards[-1]))
        return tuple(cards)

    def _take(self, resolved: Resolved, seats: Sequence[int], better: Better | None = None) -> str:
        """The plan becomes the job's; in words. ``better``: ranks are not as fast as their chips'
        rates say."""
        before, plan = self.job.plan, resolved.plan
        _refuse_few_queues(self._loaded, plan)
        cards = self._cards_for(plan, seats)
        needed = [queues_for(plan, rank) for rank in range(plan.world_size)]
        has = [0 if seat == ANEW else self._queues[seat] for seat in seats]
        pairs = list(zip(needed, has, strict=True))
        self.seats = tuple(
            ANEW if wants > got else seat for seat, (wants, got) in zip(seats, pairs, strict=True)
        )
        self._queues, self._cards = tuple(max(pair) for pair in pairs), cards
        there = with_chips(self._machine, plan.devices, cards)
        self._resolved = resolved = replace(resolved, cluster=there)
        self.paces = () if better is None else better.paces
        prediction = predict_run(resolved, chips=None if better is None else better.chips)
        files = {
            "plan.json": plan.to_json(),
            "cluster.json": there.to_json(),
            PREDICTION_FILE: prediction.to_json(),
        }
        with suppress(OSError):  # nothing is kept there
            self._lease.take(agent_address(self.job.held, RankAddress().host))
        self._times = _beside(self.job.prediction, prediction)
        self.job = replace(
            self.job,
            plan=plan,
            threads=resolved.threads,
            cards=cards,
            prediction=prediction,
            peaks=peaks_here(resolved, range(plan.world_size)),
            files={**self.job.files, **files},
        )
        return change_in_words(before, plan)


def _beside(before: Prediction | None, after: Prediction) -> str:
    """Of the time of a step, where both are known."""
    was = None if before is None else before.quantities.step_time_s
    now = after.quantities.step_time_s
    if was is None or now is None:
        return ""
    return _in_seconds(was, now)


def _in_seconds(was: float, now: float) -> str:
    return f"; a step is predicted to take {now:.3g} s instead of {was:.3g} s"


def refuse_move(loaded: Loaded, asked: Resolved, now: Plan) -> None:
    """A job computes the same under another plan, and this machine has what it takes.

    Raises:
        ConfigErrors: it would be another batch or arithmetic, or does not fit.
    """
    plan, (node,) = asked.plan, asked.cluster.nodes
    try:
        refuse_unlike(plan, now)
        for device, number in Counter(plan.devices).items():
            chips = sum(chip.device == device for chip in node.chips)
            if is_counted(device) and number > chips:
                raise ConfigError("plan", {"ranks": number}, f"at most {chips} on {device}")
    except ConfigError as error:
        raise loaded.place(error) from error
    _refuse_few_queues(loaded, plan)
    refuse_too_large(loaded, asked, range(plan.world_size))


def refuse_unlike(plan: Plan, now: Plan) -> None:
    """Raises ConfigError: under it a job would have another batch or arithmetic."""
    precisions = [sorted({s.precision for _, _, s in each.stages()}) for each in (now, plan)]
    if plan.global_batch != now.global_batch:
        expected = f"{now.global_batch}, as the run has it"
        raise ConfigError("batch.samples", plan.global_batch, expected)
    if precisions[0] != precisions[1]:
        was, wanted = (", ".join(each) for each in precisions)
        raise ConfigError("compute.precision", wanted, f"{was}, as the run computes")


def _refuse_few_queues(loaded: Loaded, plan: Plan) -> None:
    try:
        refuse_few_queues(plan, os.environ)
    except ConfigError as error:
        raise loaded.place(error) from error
