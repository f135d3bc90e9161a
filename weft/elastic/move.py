"""Another plan for a job that runs, as somebody asks in its run folder: its state goes to other
ranks without files.

The request is a small JSON file, which a command leaves and the launcher looks for. It has a plan,
and nothing of it is executed. The answer is another.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from weft.config.errors import ConfigError, ConfigErrors
from weft.elastic.failure import Epoch
from weft.plan.plan import Plan
from weft.report.events import EventLog
from weft.train.job import Job
from weft.train.run_folder import LAUNCHER_FILE, NODES_FILE, write_text
from weft.train.run_list import is_alive, last_step, plan_in_words

REQUEST_FILE = ".move.json"
ANSWER_FILE = ".moved.json"
LOOK_S = 0.1
MOST_BYTES = 1 << 24
"""Of a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What came of a request."""

    name: str
    """Of the request."""
    problem: str = ""
    """Why there is no other plan; empty where there is."""
    words: str = ""
    """From which plan to which."""
    after_step: int = 0
    """The last under the plan before."""
    step: int = 0
    """The first under the new one that is finished."""
    seconds: float = 0.0
    """From when the request was seen to that."""


def ask(folder: Path, plan: Plan) -> str:
    """Leave a request; its name.

    Raises:
        ConfigError: another request is pending.
    """
    name = secrets.token_hex(8)
    text = json.dumps({"name": name, "plan": json.loads(plan.to_json())})
    draft = folder / f"{REQUEST_FILE}.{name}"
    write_text(draft, text)
    try:
        os.link(draft, folder / REQUEST_FILE)
    except FileExistsError:
        expected = "a run without a pending request"
        raise ConfigError("RUN", str(folder), expected, "Wait for its answer.") from None
    finally:
        draft.unlink()
    return name


def is_there(folder: Path) -> bool:
    """A launcher that looks for requests works in a run folder."""
    return (folder / LAUNCHER_FILE).exists() and is_alive(folder)


def has_machines(folder: Path) -> bool:
    """It guides those of several."""
    return (folder / NODES_FILE).exists()


def await_answer(folder: Path, name: str) -> Moved:
    """What came of a request, as soon as it is known."""
    file = folder / ANSWER_FILE
    while True:
        works = is_there(folder)  # before: its last word is not missed
        there = works and os.path.lexists(folder / REQUEST_FILE)
        with suppress(OSError, ValueError, TypeError):
            answer = Moved(**json.loads(file.read_text()))
            if answer.name == name:
                file.unlink(missing_ok=True)
                return answer
        if not works:
            (folder / REQUEST_FILE).unlink(missing_ok=True)
        if not there:
            return Moved(name=name, problem="the run is gone")
        time.sleep(LOOK_S)


class CanMove(Protocol):
    """A job that can go on under another plan."""

    @property
    def job(self) -> Job:
        """Under the plan that it has now."""

    @property
    def seats(self) -> tuple[int, ...]:
        """For each rank the one that its process was under the plan before, or ``ANEW``."""

    def check(self, plan: Plan) -> None:
        """Raises ConfigErrors: the job cannot go on under it."""

    def under(self, plan: Plan) -> str:
        """Go on under it; from which plan to which.

        Raises:
            ConfigErrors: what was there when it was checked is there no more.
        """


class Moves:
    """The launcher's side. A context manager: requests are looked for meanwhile.

    Args:
        tell: Says a line to the person who started the job.
    """

    def __init__(self, replans: CanMove, tell: Callable[[str], None]) -> None:
        self._replans = replans
        self._tell = tell
        self._out = replans.job.out
        self._events = EventLog(self._out, began=replans.job.began, watches=True)
        self._plan: Plan | None = None
        self._name = ""
        self._since = 0.0
        self._words = ""
        self._after: int | None = None
        """The last step under the plan before, once the ranks have left."""
        self._stays = False
        """What was refused is no file that can be cleared."""

    def __enter__(self) -> Moves:
        self._clear(REQUEST_FILE, ANSWER_FILE)
        (self._out / LAUNCHER_FILE).write_text(f"{os.getpid()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._clear(LAUNCHER_FILE)
        self._read()
        if self._name:
            self._answer(problem="the run ended before")
        self._clear(REQUEST_FILE)

    def wanted(self) -> bool:
        """A request waits for the ranks. Answers the one before as soon as a step is finished."""
        if self._after is not None:
            step = self._step()
            if step > self._after:
                self._answer(words=self._said(), after_step=self._after, step=step)
        elif not self._name:
            is_asked = os.path.lexists(self._out / REQUEST_FILE)
            self._stays = self._stays and is_asked
            if is_asked and not self._stays:
                self._read()
        return self._plan is not None and self._after is None

    def epoch(self) -> Epoch:
        """The ranks have left for the plan that was asked for."""
        assert self._plan is not None, "nobody asked"
        self._after = self._step()
        try:
            self._words = self._replans.under(self._plan)
        except ConfigErrors as errors:  # since it was asked, ranks were lost
            self._answer(problem=str(errors.errors[0]))
            return Epoch((self._replans.job,), self._replans.job.plan.world_size)
        job = self._replans.job
        said = f"the plan is now {self._words}, as `weft elastic move` asked"
        self._events.write("move", said, step=self._after)
        self._tell(f"after step {self._after}: {said}")
        return Epoch((job,), job.plan.world_size, self._replans.seats)

    def _said(self) -> str:
        """From which plan to which; where ranks were lost before a step was done, to which then."""
        now = self._replans.job.plan
        if now == self._plan:
            return self._words
        return f"{plan_in_words(now)}, for ranks were lost; it was to be {self._words}"

    def _read(self) -> None:
        """A request is taken, or refused, whatever it is."""
        self._since = time.monotonic()
        try:
            asked = json.loads(_content(self._out / REQUEST_FILE))
            self._name = str(asked["name"])
            plan = Plan.from_json(json.dumps(asked["plan"]))
            self._replans.check(plan)
        except FileNotFoundError:
            return
        except ConfigErrors as errors:
            self._answer(problem=str(errors.errors[0]))
        except Exception as error:  # noqa: BLE001 - anybody may write there; the job goes on
            why = str(error) or type(error).__name__
            self._answer(problem=f"the request cannot be read: {why}")
        else:
            self._plan = plan

    def _answer(self, **facts: object) -> None:
        answer = Moved(name=self._name, seconds=time.monotonic() - self._since)
        text = json.dumps({**asdict(answer), **facts})
        with suppress(OSError):  # such as a full disk, which ends no job
            write_text(self._out / ANSWER_FILE, text)
        self._clear(REQUEST_FILE)
        self._stays = os.path.lexists(self._out / REQUEST_FILE)
        self._plan, self._name, self._after = None, "", None

    def _clear(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):  # somebody made a folder of that name
                (self._out / name).unlink(missing_ok=True)

    def _step(self) -> int:
        return int(last_step(self._out / "metrics.jsonl").get("step", 0))


def _content(path: Path) -> bytes:
    """Of a regular file that is not too long; opening anything else could wait for ever.

    Raises OSError or ValueError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("it is too long")
    return content
