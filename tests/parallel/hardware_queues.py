"""A model of what GPUs do with an executor's lists: streams of ranks that share hardware queues.

Every rank asks for its operations without waiting: the receives posted before an action, the wait
of the compute stream for the action's input, the action, the send of its result, and the compute
stream's waits for what is certain to have arrived. Each way over a border has a stream. Streams lie
on queues: an operation starts once the one before it in its queue has started, the one before it in
its stream has ended, and so has what it waits for. A send and its receive end when both started.
"""

from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import count

from weft.schedules.action import Action
from weft.schedules.clocks import Clocks
from weft.schedules.releases import releases

COMPUTE = (-1, -1)
Message = tuple[Action, Action]
"""Who gives and who takes; what a rank does itself is none."""
Lists = Sequence[Sequence[Action]]
Queues = Callable[[int], int]
"""From the number of a stream of a rank to that of its queue."""


def always_early(clocks: Clocks, position: int, ahead: int = 2) -> list[list[Action]]:
    """What ``receives`` must not be: every receive so much early, whatever its sender waits for."""
    own = clocks.schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    for number, action in enumerate(own):
        if clocks.givers(action):
            result[max(0, number - ahead)].append(action)
    return result


class Job:
    """The operations of all ranks of a pipeline, one rank to a position, with queues of its own."""

    def __init__(self, clocks: Clocks, posts: Sequence[Lists], queue_of: Queues) -> None:
        self._before: dict[int, list[int]] = {}
        self._numbers = count()
        self._started: dict[tuple[str, Message], int] = {}
        self._ended: dict[tuple[str, Message], int] = {}
        for position in range(len(clocks.schedule)):
            self._issue(clocks, position, posts[position], queue_of)
        for (kind, message), started in self._started.items():
            if kind == "receive":
                for end in (self._ended["receive", message], self._ended["send", message]):
                    self._before[end] += [started, self._started["send", message]]

    def ends(self) -> bool:
        """No operation waits, however far round, for itself."""
        try:
            return len(tuple(TopologicalSorter(self._before).static_order())) > 0
        except CycleError:
            return False

    def _streams(self, clocks: Clocks, position: int) -> dict[tuple[int, int], int]:
        """Numbers of the compute stream and, as channels are opened, of those of each border."""
        found = set()
        for action in clocks.schedule[position]:
            found |= {(giver.stage, action.stage) for giver in clocks.givers(action)}
            found |= {(action.stage, taker.stage) for taker in clocks.takers(action)}
        by_border = sorted(found, key=lambda ends: (sorted(ends), ends))
        return {channel: number for number, channel in enumerate([COMPUTE, *by_border])}

    def _issue(self, clocks: Clocks, position: int, posts: Lists, queue_of: Queues) -> None:
        streams = self._streams(clocks, position)
        in_queue: dict[int, int] = {}
        in_stream: dict[int, int] = {}

        def ask(kind: str, message: Message, stream: tuple[int, int], *events: int) -> None:
            lane = streams[stream]
            queue = queue_of(lane)
            start, end = next(self._numbers), next(self._numbers)
            self._before[start] = [
                *events,
                *([in_queue[queue]] if queue in in_queue else []),
                *([in_stream[lane]] if lane in in_stream else []),
            ]
            self._before[end] = [start]
            in_queue[queue], in_stream[lane] = start, end
            self._started[kind, message], self._ended[kind, message] = start, end

        arrived = releases(clocks, position)
        for number, action in enumerate(clocks.schedule[position]):
            for coming in posts[number]:
                done = [in_stream[0]] if 0 in in_stream else []  # as libraries do: not before
                for giver in clocks.givers(coming):
                    ask("receive", (giver, coming), (giver.stage, coming.stage), *done)
            for giver in clocks.givers(action):
                if ("receive", (giver, action)) in self._ended:
                    ask("await", (giver, action), COMPUTE, self._ended["receive", (giver, action)])
            ask("do", (action, action), COMPUTE)
            for taker in clocks.takers(action):
                done = [self._ended["do", (action, action)]]
                ask("send", (action, taker), (action.stage, taker.stage), *done)
            for sent in arrived[number]:
                for taker in clocks.takers(sent):
                    ask("let go", (sent, taker), COMPUTE, self._ended["send", (sent, taker)])
