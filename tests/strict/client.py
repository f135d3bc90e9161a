"""What a rank says to the server, and the data that comes back. Any of its threads may."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from threading import Condition
from types import FrameType
from typing import Any

from strict.rules import Answer, Call, GroupName
from strict.server import Where

ROOT = Path(__file__).parents[2]
PROGRAM = tuple(f"{ROOT / folder}/" for folder in ("weft", "tests", "benchmarks"))
COMM = str(ROOT / "weft" / "comm")
OURS = {str(path) for path in Path(__file__).parent.glob("[!t]*.py")}
Arrive = Callable[[Any], None]
"""Puts what came for a call where it belongs."""


class Client:
    """One rank's way to the server, for one job."""

    def __init__(self, rank: int, where: Where) -> None:
        self.rank = rank
        self.num_groups = 0
        self._pipe = connection.Client(where.socket, family="AF_UNIX")
        self._pipe.send(rank)
        self._condition = Condition()
        self._is_read = False
        self._num_questions = 0
        self._answers: dict[int, Answer] = {}
        self._names: Counter[tuple[int, ...]] = Counter()
        self._arrivals: dict[GroupName, list[Arrive | None]] = {}

    def name(self, ranks: tuple[int, ...]) -> tuple[GroupName, int]:
        """Of a group that is opened now: its name and that of its stream."""
        with self._condition:
            number, stream = self._names[ranks], self.num_groups
            self._names[ranks] += 1
            self.num_groups += 1
        self._arrivals[ranks, number] = []
        return (ranks, number), stream

    def names(self) -> list[tuple[int, ...]]:
        """Ranks of all groups that were opened."""
        return list(self._names)

    def post(self, call: Call, arrive: Arrive) -> int:
        """Make a call; its number within the group."""
        with self._condition:
            arrivals = self._arrivals[call.group]
            arrivals.append(arrive)
            self._pipe.send((call,))
            return len(arrivals) - 1

    def wait(self, group: GroupName, number: int, place: str) -> None:
        """Return when the call is over and its data, and that of those before, has arrived."""
        with self._condition:
            self._num_questions += 1
            question = self._num_questions
            self._pipe.send(((question, group, number), place))
            while question not in self._answers:
                if self._is_read:
                    self._condition.wait()
                else:
                    self._read()
            answer = self._answers.pop(question)
        if answer.error:
            raise RuntimeError(answer.error)

    def _read(self) -> None:
        """Take in one answer, whoever asked; others may go on meanwhile."""
        self._is_read = True
        self._condition.release()
        try:
            answer: Answer = self._pipe.recv()
        finally:
            self._condition.acquire()
            self._is_read = False
            self._condition.notify_all()
        for number, data in answer.results:
            arrive = self._arrivals[answer.group][number]
            assert arrive is not None
            self._arrivals[answer.group][number] = None
            arrive(data)
        self._answers[answer.question] = answer

    def close(self) -> None:
        self._pipe.close()


def place(num_frames: int = 2) -> str:
    """Where the program is, outside of what carries its calls."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < num_frames:
        file = frame.f_code.co_filename
        if file.startswith(PROGRAM) and not file.startswith(COMM) and file not in OURS:
            name = file.removeprefix(f"{ROOT}/")
            found.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "nowhere"
