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

COMPUTE = (-1, "")
Lists = Sequence[Sequence[Action]]
Queues = Callable[[int], int]
"""From the number of a stream of a rank to that of its queue."""


def always_early(clocks: Clocks, position: int, ahead: int = 2) -> list[list[Action]]:
    """What ``receives`` must not be: every receive so much early, whatever its sender waits for."""
    own = clocks.schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    for number, action in enumerate(own):
        if clocks.giver(action) is not None:
            result[max(0, number - ahead)].append(action)
    return result


class Job:
    """The operations of all ranks of a pipeline, one rank to a position, with queues of its own."""

    def __init__(self, clocks: Clocks, posts: Sequence[Lists], queue_of: Queues) -> None:
        self._before: dict[int, list[int]] = {}
        self._numbers = count()
        self._started: dict[tuple[str, Action], int] = {}
        self._ended: dict[tuple[str, Action], int] = {}
        for position in range(len(clocks.schedule)):
            self._issue(clocks, position, posts[position], queue_of)
        for (kind, action), started in self._started.items():
            if kind == "receive":
                giver = clocks.giver(action)
                assert giver is not None
                for end in (self._ended["receive", action], self._ended["send", giver]):
                    self._before[end] += [started, self._started["send", giver]]

    def ends(self) -> bool:
        """No operation waits, however far round, for itself."""
        try:
            return len(tuple(TopologicalSorter(self._before).static_order())) > 0
        except CycleError:
            return False

    def _streams(self, clocks: Clocks, position: int) -> dict[tuple[int, str], int]:
        """Numbers of the compute stream and, as channels are opened, of those of each border."""
        found = set()
        for action in clocks.schedule[position]:
            for other in (clocks.giver(action), clocks.taker(action)):
                if other is not None:
                    found.add(_channel(action, other))
        by_border = sorted(found, key=lambda channel: (channel[0], "FB".index(channel[1])))
        return {channel: number for number, channel in enumerate([COMPUTE, *by_border])}

    def _issue(self, clocks: Clocks, position: int, posts: Lists, queue_of: Queues) -> None:
        streams = self._streams(clocks, position)
        in_queue: dict[int, int] = {}
        in_stream: dict[int, int] = {}

        def ask(kind: str, action: Action, stream: tuple[int, str], *events: int) -> None:
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
            self._started[kind, action], self._ended[kind, action] = start, end

        arrived = releases(clocks, position)
        for number, action in enumerate(clocks.schedule[position]):
            for coming in posts[number]:
                giver = clocks.giver(coming)
                assert giver is not None
                done = [in_stream[0]] if 0 in in_stream else []  # as libraries do: not before
                ask("receive", coming, _channel(giver, coming), *done)
            if ("receive", action) in self._ended:
                ask("await", action, COMPUTE, self._ended["receive", action])
            ask("do", action, COMPUTE)
            taker = clocks.taker(action)
            if taker is not None:
                ask("send", action, _channel(action, taker), self._ended["do", action])
            for sent in arrived[number]:
                ask("let go", sent, COMPUTE, self._ended["send", sent])


def _channel(action: Action, other: Action) -> tuple[int, str]:
    """The stream of one way over a border: for activations, or for gradients."""
    return min(action.stage, other.stage), "F" if action.kind == "F" else "B"
