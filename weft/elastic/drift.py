"""Another plan for a job whose ranks compute slower or faster than was predicted.

Rank 0 leaves in the run folder what it measured, where that is new. The launcher asks the planner,
beside the ranks that go on, and lets the job move where that pays.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low

from weft.config.errors import ConfigErrors
from weft.elastic.failure import Epoch, Moves
from weft.elastic.replan import Replans
from weft.report.events import EventLog
from weft.resolve.paced import Better
from weft.train.job import Job
from weft.train.run_folder import PACES_FILE
from weft.train.run_list import last_step

LEAST_SAVING = 0.05
"""Part of the time until the end of the run that another plan has to save, when the job has moved:
less no prediction can tell."""
MOST_AN_HOUR = 6
"""Times that the planner is asked, and so that the job moves."""
HOUR_S = 3600.0
MOST_NAMED = 4
"""Ranks in one sentence."""
MOVE_S = 3.0
"""That a move takes, as far as none was seen: ranks meet again and build."""
STATE_BYTES = 12
"""Of a parameter: itself and AdamW's two means in fp32."""
STATE_BYTES_S = 5e8
"""In which they are copied, and read again."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What rank 0 found."""

    step: int
    predicted_s: tuple[float, ...]
    """Of a step, by rank: what it was held to."""
    paces: tuple[float, ...]
    """How many times as long it takes."""
    usual: float | None = None
    """What a rank is beside that keeps to the plan: a profile may be off for all alike. None where
    the plan goes by what was measured before."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the planner says to it."""

    job: Job
    """That it was asked for."""
    measured: Measured
    better: Better | None
    problem: str = ""
    """Why there is none."""


def saving(better: Better, steps: int, move_s: float) -> float:
    """Part of the time for so many steps that a job saves which moves first; below 0: it loses."""
    if steps <= 0:
        return -1.0
    return 1 - (better.step_s + move_s / steps) / better.now_s


def in_words(measured: Measured) -> str:
    """Who is off, as far as the others keep to the plan."""
    usual = measured.usual
    paces = {rank: pace / (usual or 1.0) for rank, pace in enumerate(measured.paces)}
    off = {rank: pace for rank, pace in paces.items() if not 0.9 <= pace <= 1.1}
    if not off:
        return "no rank is slower than the others for its plan any more"
    most = sorted(off, key=lambda rank: -max(off[rank], 1 / off[rank]))[:MOST_NAMED]
    words = [f"rank {rank} {off[rank]:.3g} times" for rank in sorted(most)]
    more = f" and {len(off) - len(most)} others" if len(off) > len(most) else ""
    beside = "" if usual is None else ", beside the others"
    return f"{', '.join(words)}{more} as long at work as the plan says{beside}"


class Drift:
    """The launcher's side.

    Args:
        tell: Says a line to the person who started the job.
        clock: Seconds, from anywhere.
    """

    def __init__(
        self,
        replans: Replans,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replans, self._tell, self._clock = replans, tell, clock
        out = replans.job.out
        self._metrics, self._file = out / "metrics.jsonl", out / PACES_FILE
        self._events = EventLog(out, began=replans.job.began, watches=True)
        self._asked_at: deque[float] = deque(maxlen=MOST_AN_HOUR)
        self._measured: Measured | None = None
        """The newest that the planner was not asked about."""
        self._is_asking = False
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._answer: Answer | None = None
        """That the ranks are to leave for."""
        self._move_s = MOVE_S + _state_s(replans)
        self._left: tuple[float, int] | None = None
        """When the ranks had left, and after which step, until one more is done."""

    def __enter__(self) -> Drift:
        self._file.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def wanted(self) -> bool:
        """The ranks are to come to the door for a plan that saves time."""
        self._time_move()
        self._read()
        if self._measured is not None and not self._is_of_now(self._measured):
            self._measured = None
        if self._answer is not None:
            if self._is_stale(self._answer):
                self._answer = None
        elif self._is_asking:
            self._hear()
        elif self._measured is not None and self._may_ask():
            self._ask(self._measured)
        return self._answer is not None

    def epoch(self) -> Epoch:
        """They have come: what they do next."""
        answer, self._answer, step = self._answer, None, self._step()
        seats = None
        if answer is not None and not self._is_stale(answer):
            seats = self._taken(answer, step)
        job = self._replans.job
        return Epoch((job,), job.plan.world_size, seats)

    def _taken(self, answer: Answer, step: int) -> tuple[int, ...] | None:
        """The plan becomes the job's, unless the machine has changed meanwhile."""
        assert answer.better is not None, "the ranks were wanted for a plan"
        try:
            words = self._replans.at_paces(answer.better)
        except ConfigErrors as errors:
            self._stays(answer.measured, str(errors.errors[0]))
            return None
        self._left = self._clock(), step
        said = f"{in_words(answer.measured)}: the plan is now {words}"
        facts = {
            "paces": list(answer.measured.paces),
            "now_s": answer.better.now_s,
            "predicted_s": answer.better.step_s,
        }
        self._events.write("replan", said, step=step, facts=facts)
        self._tell(f"after step {step}: {said}")
        return self._replans.seats

    def _is_stale(self, answer: Answer) -> bool:
        """Ranks were lost meanwhile, or somebody asked for another plan."""
        return answer.job is not self._replans.job

    def _read(self) -> None:
        """What rank 0 found, if it is about the job as it is."""
        try:
            text = self._file.read_text()
        except OSError:
            return
        self._file.unlink(missing_ok=True)
        try:
            step, predicted_s, paces = json.loads(text)
            predicted_s, paces = (tuple(map(float, each)) for each in (predicted_s, paces))
            usual = None if self._replans.paces else median_low(paces)
            measured = Measured(int(step), predicted_s, paces, usual)
        except (ValueError, TypeError):  # rank 0 did not write that
            return
        self._measured = measured

    def _is_of_now(self, measured: Measured) -> bool:
        """It is about the job as it is, not as it was before a move or a loss."""
        prediction = self._replans.job.prediction
        return prediction is not None and prediction.busy_s == measured.predicted_s

    def _may_ask(self) -> bool:
        """What is too much within an hour waits."""
        asked = self._asked_at
        return len(asked) < MOST_AN_HOUR or self._clock() - asked[0] >= HOUR_S

    def _ask(self, measured: Measured) -> None:
        """Beside the ranks, and whoever looks after them: a search may take a while."""
        self._measured, self._is_asking = None, True
        self._asked_at.append(self._clock())
        job, replans = self._replans.job, self._replans

        def ask() -> None:
            better, problem = None, ""
            try:
                better = replans.better(measured.paces)
            except ConfigErrors as errors:
                problem = str(errors.errors[0])
            except Exception as error:  # noqa: BLE001 - the job goes on as it is
                problem = str(error) or type(error).__name__
            self._answers.put(Answer(job, measured, better, problem))

        threading.Thread(target=ask, name="planner", daemon=True).start()

    def _hear(self) -> None:
        with suppress(queue.Empty):
            answer = self._answers.get_nowait()
            self._is_asking = False
            is_wanted = not self._is_stale(answer) and self._pays(answer)
            self._answer = answer if is_wanted else None

    def _pays(self, answer: Answer) -> bool:
        """Says so where it does not."""
        better, steps = answer.better, self._replans.job.last_step - self._step()
        if better is None:
            self._stays(answer.measured, answer.problem)
            return False
        saves = saving(better, steps, self._move_s)
        if saves >= LEAST_SAVING:
            return True
        self._stays(
            answer.measured,
            f"the best one takes {better.step_s:.3g} s a step instead of {better.now_s:.3g} s, "
            f"which saves less than {LEAST_SAVING:.0%} of {steps} steps once the job has moved",
        )
        return False

    def _stays(self, measured: Measured, why: str) -> None:
        said = f"{in_words(measured)}: the plan stays, for there is no better one: {why}"
        facts = {"paces": list(measured.paces)}
        self._events.write("replan", said, step=measured.step, facts=facts)
        self._tell(f"step {measured.step}: {said}")

    def _time_move(self) -> None:
        """The longest move that was seen is what the next one is taken to cost."""
        if self._left is not None and self._step() > self._left[1]:
            self._move_s = max(self._move_s, self._clock() - self._left[0])
            self._left = None

    def _step(self) -> int:
        return int(last_step(self._metrics).get("step", 0))


def _state_s(replans: Replans) -> float:
    return 2 * STATE_BYTES * replans.num_parameters / STATE_BYTES_S


class FirstOf:
    """Several who may want the ranks; of those who do at once, the first is served."""

    def __init__(self, several: Sequence[Moves]) -> None:
        self._several = several
        self._next: Moves | None = None

    def wanted(self) -> bool:
        """By somebody; each is asked, for each may have other things to look at."""
        found = [each for each in self._several if each.wanted()]
        self._next = found[0] if found else self._next
        return bool(found)

    def epoch(self) -> Epoch:
        """They have come."""
        assert self._next is not None, "nobody wanted them"
        return self._next.epoch()
