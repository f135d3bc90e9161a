"""Whether the ranks of a run keep the pace of their equals and of their plan."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from weft.resolve.prediction import WARM_UP_STEPS, Prediction
from weft.train.alarm import PATIENCE, Alarm, Paces, equals, slowness
from weft.train.loop import Run, StepRecord
from weft.train.run_folder import PACES_FILE, write_text


class Pace:
    """Compares the times of ranks with each other, and those of steps with the prediction.

    ``count`` goes first among the hooks; ``skip`` last, and before training. What each rank has
    ``taken`` travels with what ranks tell each other anyway, and rank 0 looks at it. An alarm ends
    with its epoch, at the latest: another plan or place is judged anew.

    Args:
        prediction: Of the run; None: nobody asked.
        tell: Says a line to the person who looks on.
        out: The run's folder, where the launcher finds that another plan may be better; None: it
            does not look.
    """

    def __init__(
        self,
        run: Run,
        prediction: Prediction | None,
        tell: Callable[[str], None],
        out: Path | None = None,
    ) -> None:
        recovery = run.config.recovery
        self._run = run
        self._tell = tell
        self._predicted = prediction or Prediction()
        self._is_on = recovery.alarm != "off"
        self._alarms = [Alarm(recovery.alarm_limit) for _ in range(run.comm.world_size)]
        self._drift = Alarm(recovery.alarm_limit)
        self._paces = Paces(recovery.alarm_limit)
        self._file = out / PACES_FILE if out and recovery.alarm == "replan" else None
        self._waited: Mapping[str, float] = {}
        """At the end of the step before, by what was waited for."""
        self._steps, self._took_s, self._busy_s = 0, 0.0, 0.0
        """Since they were last told."""
        self._waits = defaultdict[str, float](float)
        self._counted = 0
        """Steps of this start, as ``steady`` ones are."""
        steps = run.last_step - run.first_step
        self._warm_up = WARM_UP_STEPS if steps > WARM_UP_STEPS else 0
        """Steps until these count."""

    @cached_property
    def _work(self) -> list[object]:
        return list(equals(self._run.plan))

    def count(self, record: StepRecord) -> None:
        took_s = sum(numbers.seconds for numbers in record.read)
        waited = self._run.comm.recorder.waited
        since = {name: waited[name] - self._waited.get(name, 0.0) for name in waited}
        self._steps += len(record.read)
        self._took_s += took_s
        self._busy_s += took_s - sum(since.values())
        for name, seconds in since.items():
            self._waits[name] += seconds
        self._counted += 1
        self._warm_up -= 1
        if not self._warm_up:
            self._counted = 0
            self._waits.clear()

    def skip(self, _: StepRecord | None = None) -> None:
        """What was waited for since the step belongs to none."""
        self._waited = dict(self._run.comm.recorder.waited)

    @property
    def waits_s(self) -> dict[str, float]:
        """What this rank waited for in a step, and how long; nothing where a device waits, which
        the host does not see."""
        if self._run.waits_for_reads:
            return {}
        most = sorted(self._waits.items(), key=lambda each: -each[1])
        return {name: seconds / max(self._counted, 1) for name, seconds in most if seconds}

    def forget(self) -> None:
        """Pipelines have other shares now: what was predicted is of the old ones."""
        self._predicted = Prediction()
        vars(self).pop("_work", None)
        self._alarms = [Alarm(self._run.config.recovery.alarm_limit) for _ in self._alarms]

    def taken(self) -> list[float]:
        """Of a step since this was last asked: seconds, and seconds without waiting for others."""
        mine = [each / max(self._steps, 1) for each in (self._took_s, self._busy_s)]
        self._steps, self._took_s, self._busy_s = 0, 0.0, 0.0
        return mine

    def look(self, step: int, everyone: Sequence[Sequence[float]]) -> None:
        """At what all ranks have taken, on the one that speaks for the job. The first step of a
        start is none to judge by, and after the last one it is too late."""
        is_edge = step in (self._run.first_step + 1, self._run.last_step)
        if is_edge or not (self._is_on and self._run.is_main):
            return
        predicted_s = self._predicted.quantities.step_time_s
        if predicted_s:
            self._look_at_steps(step, everyone[0][0], predicted_s)
        if not self._run.waits_for_reads:  # there the host is done before its device
            busy_s = [max(busy_s, 0.0) for _, busy_s in everyone]
            self._look_at_ranks(step, busy_s)
            if self._file is not None and self._predicted.busy_s:
                self._look_at_paces(step, busy_s, self._file)

    def _look_at_steps(self, step: int, took_s: float, predicted_s: float) -> None:
        change = self._drift.look(took_s / predicted_s)
        said = f"a step takes {took_s:.3g} s; {predicted_s:.3g} s were predicted"
        if change == "raised":
            said += ": see what else runs here; if nothing does, measure again (weft chips profile)"
        if change:
            self._tell(f"step {step}: {said}")
            facts = {"seconds": took_s, "predicted_s": predicted_s, "is_over": change == "over"}
            self._run.events.write("drift", said, step=step, facts=facts)

    def _look_at_ranks(self, step: int, busy_s: Sequence[float]) -> None:
        found = slowness(busy_s, self._work, self._predicted.busy_s)
        for rank, (times, alarm) in enumerate(zip(found, self._alarms, strict=True)):
            change = alarm.look(times) if times is not None else ""
            if change:
                self._say(step, rank, times or 0.0, busy_s[rank], is_over=change == "over")

    def _look_at_paces(self, step: int, busy_s: Sequence[float], file: Path) -> None:
        """Whether the launcher is to plan again."""
        predicted_s = self._predicted.busy_s
        new = self._paces.look([b / p for b, p in zip(busy_s, predicted_s, strict=True)])
        if new:
            with suppress(OSError):  # such as a full disk: the plan stays
                write_text(file, json.dumps([step, predicted_s, new]))

    def _say(self, step: int, rank: int, times: float, busy_s: float, *, is_over: bool) -> None:
        member = self._run.comm.members[rank]
        where = {"host": member.node.partition("/")[0], "chip": member.chip or member.family}
        has_equals = self._work.count(self._work[rank]) > 1
        held_to = "ranks with the same work" if has_equals else "its plan says"
        who = f"rank {rank} ({', '.join(filter(None, where.values()))})"
        said = f"{who} computes {busy_s:.3g} s a step, {times:.3g} times as long as {held_to}"
        if is_over:
            said = f"{who} keeps pace again"
        else:
            every = PATIENCE * self._run.config.train.log_every
            said += f", for {every} steps: see what else runs there, or give it less work"
        self._tell(f"step {step}: {said}")
        facts = {"times": times, "busy_s": busy_s, "is_over": is_over, **where}
        self._run.events.write("straggler", said, step=step, rank=rank, facts=facts)
