"""What may happen when on the ranks of one job: streams, hardware queues and who meets whom.

The manners are NCCL's, at their strictest. The calls of a rank on one group keep their order, on a
stream of the group's own. A rank's streams, that of what it computes among them, share a few
hardware queues: what was given to a queue begins when all before it has begun, and what was before
it in its stream is done. A call begins no earlier than what its caller's stream had to do when it
was made is done, meets the others' calls in order and by no tag, and is done when all it needs have
begun. Nobody polls, nobody buffers.

No tensor, process or clock is in here: bytes come and go as they are.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

COMPUTE = -1
"""The stream of what a rank computes; those of groups are numbered as they are opened."""
DELAYS_S = (0.0, 0.0, 0.0, 0.0005, 0.002)
"""One of them is how long a call goes on when all have come."""

GroupName = tuple[tuple[int, ...], int]
"""The ranks of a group, and how many groups of the same ranks were opened before it."""


@dataclass(frozen=True, slots=True)
class Header:
    """What both ends, or all members, must agree about."""

    kind: str
    elements: int
    dtype: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.detail} of {self.elements} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to or from another rank of the group."""

    sends: bool
    peer: int
    header: Header


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank asks of one group: a collective, or messages that are under way together."""

    group: GroupName
    stream: int
    place: str
    """Where in the program."""
    collective: Header | None = None
    messages: Sequence[Message] = ()
    data: Sequence[bytes] = ()
    """What this rank gives to a collective, or with each message."""

    def __str__(self) -> str:
        if self.collective is not None:
            what = f"{self.collective} among ranks {_listed(self.group[0])}"
        else:
            what = " and ".join(
                f"{'send' if each.sends else 'receive'} of {each.header.elements}"
                f" {each.header.dtype} {'to' if each.sends else 'from'} rank {each.peer}"
                for each in self.messages
            )
        return f"{what} at {self.place}"


class Question(NamedTuple):
    """A rank waits for one of its calls, counted by group."""

    id: int
    group: GroupName
    number: int


@dataclass(eq=False, slots=True)
class Meeting:
    """Calls of several ranks that belong together."""

    ranks: tuple[int, ...]
    steps: dict[int, Step] = field(default_factory=dict)
    """Of those that have asked, by rank."""
    headers: dict[int, Header] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    is_over: bool = False


@dataclass(eq=False, slots=True)
class Step:
    """Something in a hardware queue: a call, or the compute stream's mark before or after one."""

    rank: int
    queue: int
    text: str
    call: Call | None = None
    question: Question | None = None
    """What its end answers."""
    after: list[Step] = field(default_factory=list)
    """What must be done first; what the queue holds before it must have begun."""
    meetings: list[Meeting] = field(default_factory=list)
    has_begun: bool = False
    is_done: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass(frozen=True, slots=True)
class Answer:
    """To a rank that waits."""

    rank: int
    question: int
    group: GroupName = ((), 0)
    results: list[Any] = field(default_factory=list)
    """Of the group's calls, up to the one asked for: number and data of each not told before."""
    error: str = ""


class Rules:
    """Everything that the ranks of a job have asked, and what comes of it.

    Args:
        queues: Hardware queues of a rank.
        seed: Of how streams share them, and of delays.
        drops: A rank, and the number of its call at which it is lost.
    """

    def __init__(self, queues: int, seed: int, drops: tuple[int, int] | None = None) -> None:
        self.answers: list[Answer] = []
        """For whoever runs this to take away."""
        self.num_calls = 0
        self.error = ""
        self._num_queues, self._seed, self._drops = queues, seed, drops
        self._random = Random(seed)
        self._queues: dict[tuple[int, int], deque[Step]] = {}
        """What has not begun, by rank and number."""
        self._last: dict[tuple[int, int], Step] = {}
        """Of each stream of a rank."""
        self._calls: dict[tuple[int, GroupName], list[Step | None]] = {}
        self._given: Counter[tuple[int, GroupName]] = Counter()
        """Results that a rank has, by group."""
        self._posted: Counter[Any] = Counter()
        self._meetings: dict[Any, Meeting] = {}
        self._begun: dict[tuple[int, GroupName], Step] = {}
        """The call of a group that is under way on a rank."""
        self._due: list[tuple[float, int, Meeting]] = []
        self._waiting: dict[int, dict[int, Step]] = {}
        """By rank, what it asked and waits for."""
        self._gone: dict[int, str] = {}
        """Ranks that ask nothing any more, and why."""
        self._look: deque[tuple[int, int]] = deque()

    def post(self, rank: int, call: Call, now: float) -> None:
        """A rank makes a call and goes on."""
        if rank in self._gone:
            return
        self.num_calls += 1
        self._posted[rank] += 1
        if self._drops == (rank, self._posted[rank]):
            self._gone[rank] = f"rank {rank} was dropped before its {call}"
            return
        mark = self._step(rank, COMPUTE, f"what it computes before {call}", after=[])
        step = self._step(rank, call.stream, str(call), call=call, after=[mark])
        step.meetings = list(self._meet(step, call))
        self._calls.setdefault((rank, call.group), []).append(step)
        self._run(now)

    def wait(self, rank: int, question: Question, place: str, now: float) -> None:
        """A rank's compute stream, and here the rank itself, waits for a call."""
        if self.error or rank in self._gone:
            self.answers.append(Answer(rank, question.id, error=self.error or self._gone[rank]))
            return
        waited = self._calls[rank, question.group][question.number]
        text = f"wait at {place} for {waited.call if waited else 'a call that is over'}"
        after = [] if waited is None else [waited]
        step = self._step(rank, COMPUTE, text, question=question, after=after)
        self._waiting.setdefault(rank, {})[question.id] = step
        self._run(now)

    def leave(self, rank: int) -> None:
        """A rank makes no more calls."""
        self._gone.setdefault(rank, f"rank {rank} has left the job")

    def advance(self, now: float) -> float | None:
        """End what has gone on long enough. When to come again, if that is known."""
        while self._due and self._due[0][0] <= now:
            meeting = heapq.heappop(self._due)[2]
            meeting.is_over = True
            for step in meeting.steps.values():
                if all(each.is_over for each in step.meetings):
                    self._end(step)
            self._run(now)
        return self._due[0][0] if self._due else None

    def check(self) -> None:
        """Fail if somebody waits for ever. Nothing must be due."""
        if self.error or not any(self._waiting.values()) or self._due:
            return
        for waiting in list(self._waiting.values()):
            for step in waiting.values():
                path = self._for_ever([step])
                if path:
                    self.fail(self._told(path))
                    return

    def status(self) -> str:
        """Who waits for what now, in words."""
        waiting = [str(step) for each in self._waiting.values() for step in each.values()]
        return "; ".join(waiting) or "nobody waits"

    # --- queues ---

    def _step(
        self,
        rank: int,
        stream: int,
        text: str,
        *,
        after: list[Step],
        call: Call | None = None,
        question: Question | None = None,
    ) -> Step:
        """The last thing that a stream of a rank has to do."""
        queue = Random(f"{self._seed} {rank} {stream}").randrange(self._num_queues)
        last = self._last.get((rank, stream))
        if last is not None and not last.is_done:
            after.append(last)
        step = Step(rank, queue, text, call, question, after)
        self._last[rank, stream] = step
        self._queues.setdefault((rank, queue), deque()).append(step)
        self._look.append((rank, queue))
        return step

    def _run(self, now: float) -> None:
        """Begin what can, until nothing more can."""
        while self._look and not self.error:
            queue = self._queues[self._look.popleft()]
            while queue and all(step.is_done for step in queue[0].after) and not self.error:
                self._begin(queue.popleft(), now)

    def _begin(self, step: Step, now: float) -> None:
        step.has_begun = True
        if not step.meetings:
            self._end(step)
            return
        assert step.call is not None
        self._begun[step.rank, step.call.group] = step
        for meeting in step.meetings:
            self._compare(step, meeting)
            begun = [each for each in meeting.steps.values() if each.has_begun]
            if len(begun) == len(meeting.ranks) and not self.error:
                due = now + self._random.choice(DELAYS_S)
                heapq.heappush(self._due, (due, self._random.getrandbits(32), meeting))

    def _end(self, step: Step) -> None:
        if step.is_done:
            return
        step.is_done = True
        step.after.clear()
        # Whoever waits for it is at the head of some queue of the same rank.
        self._look.extend(key for key in self._queues if key[0] == step.rank)
        if step.question is not None:
            self._answer(step.rank, step.question)

    def _answer(self, rank: int, question: Question) -> None:
        del self._waiting[rank][question.id]
        _, group, number = question
        calls, first = self._calls[rank, group], self._given[rank, group]
        results = []
        for each in range(first, number + 1):
            done = calls[each]
            assert done is not None and done.is_done, "calls of a group end in order"
            results.append((each, _results(done)))
            calls[each] = None
        self._given[rank, group] = max(first, number + 1)
        self.answers.append(Answer(rank, question.id, group, results))

    # --- who meets whom ---

    def _meet(self, step: Step, call: Call) -> Iterator[Meeting]:
        rank = step.rank
        if call.collective is not None:
            yield self._place(step, (call.group,), call.group[0], call.collective, call.data[0])
        for each, data in zip(call.messages, call.data, strict=False):
            ends = (rank, each.peer) if each.sends else (each.peer, rank)
            yield self._place(step, (call.group, ends), ends, each.header, data)

    def _place(
        self, step: Step, lane: tuple[Any, ...], ranks: tuple[int, ...], header: Header, data: bytes
    ) -> Meeting:
        """The meeting that is this rank's next on the lane."""
        number = self._posted[lane, step.rank]
        self._posted[lane, step.rank] += 1
        meeting = self._meetings.setdefault((lane, number), Meeting(ranks))
        meeting.steps[step.rank], meeting.headers[step.rank] = step, header
        meeting.data[step.rank] = data
        if len(meeting.steps) == len(ranks):
            del self._meetings[lane, number]
        return meeting

    def _compare(self, step: Step, meeting: Meeting) -> None:
        """Headers are exchanged before data."""
        call = step.call
        assert call is not None
        for rank, other in meeting.steps.items():
            if other.has_begun and meeting.headers[rank] != meeting.headers[step.rank]:
                self.fail(f"mismatch: {step}; but {other}")
                return
        for rank in meeting.ranks:
            other_begun = self._begun.get((rank, call.group))
            if other_begun is None or other_begun.is_done or rank == step.rank:
                continue
            theirs = other_begun.call
            assert theirs is not None
            needs_us = any(step.rank in m.ranks and not m.is_over for m in other_begun.meetings)
            if needs_us and (theirs.collective is None) != (call.collective is None):
                self.fail(f"mismatch: {step}; but {other_begun}")
                return

    # --- for ever ---

    def _for_ever(self, path: list[Step | int]) -> list[Step | int]:
        """What ``path`` leads to, if that is somebody who is gone or a place on the path."""
        seen: set[Step | int] = set()

        def follow(path: list[Step | int]) -> list[Step | int]:
            last = path[-1]
            if isinstance(last, int) and last in self._gone:
                return path
            for follows in self._needs(last):
                if follows in path:
                    return [*path[path.index(follows) :], follows]
                if follows not in seen:
                    seen.add(follows)
                    found = follow([*path, follows])
                    if found:
                        return found
            return []

        return follow(path)

    def _needs(self, what: Step | int) -> Iterator[Step | int]:
        """What must happen before this: other steps, or a rank's next call (its number)."""
        if isinstance(what, int):
            yield from self._waiting.get(what, {}).values()
        elif what.has_begun:
            for meeting in what.meetings:
                for rank in () if meeting.is_over else meeting.ranks:
                    other = meeting.steps.get(rank)
                    if other is None:
                        yield rank
                    elif not other.has_begun:
                        yield other
        else:
            head = self._queues[what.rank, what.queue][0]
            if head is not what:
                yield head
            yield from (step for step in what.after if not step.is_done)

    def _told(self, path: Sequence[Step | int]) -> str:
        """The way along ``path``, in one line."""
        last = path[-1]
        words = [f"{self._gone[last]}: " if isinstance(last, int) and last in self._gone
                 else "deadlock: "]  # fmt: skip
        for here, there in pairwise(path):
            if isinstance(here, int):  # whose next call ``there`` keeps from coming
                continue
            if isinstance(there, int):
                words.append(f"{here}, which needs rank {there} to come; ")
            elif here.has_begun:
                words.append(f"{here}, which needs ")
            elif there in here.after:
                words.append(f"{here}, after ")
            else:
                words.append(f"{here}, in hardware queue {here.queue} behind ")
        end = "the first" if words[-1].endswith(("behind ", "needs ", "after ")) else ""
        return "".join([*words, end]).removesuffix("; ")

    def fail(self, text: str) -> None:
        self.error = text
        for rank, waiting in self._waiting.items():
            self.answers += [Answer(rank, question, error=text) for question in waiting]
            waiting.clear()


def _results(step: Step) -> Any:
    """What came: for a collective every rank's data, for messages that of each received one."""
    assert step.call is not None
    if step.call.collective is not None:
        (meeting,) = step.meetings
        return [meeting.data[rank] for rank in meeting.ranks]
    return [
        None if message.sends else meeting.data[message.peer]
        for message, meeting in zip(step.call.messages, step.meetings, strict=True)
    ]


def _listed(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
