"""When a stage may start to receive: early, but never what cannot come before it goes on itself,
and never so late that its sender is kept from what the stage waits for.

On a GPU a message is a kernel that waits for the other side. It holds up the next message of its
channel, and with that what was asked for after it where streams share a queue of the hardware. So a
receive could wait for itself where its sender awaits an action of this position that is still to
come; and so could one that is asked for before another, of a message that leaves earlier.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.schedules.action import Action
from weft.schedules.clocks import Clocks

AHEAD = 2
"""Actions before its own that a receive starts at the earliest, where it need not be earlier: at
most as many more inputs are held."""


def receives(clocks: Clocks, ahead: int = AHEAD) -> list[list[list[Action]]]:
    """For every position, for every action of it: those whose input is received from then on.

    One is started before its own action at the latest, and at the earliest ``ahead`` actions
    before, once the schedule proves that its senders await none of this position's actions from
    there on. That is played where all streams of a position share one queue; whenever nothing can
    go on, a receive that holds up its position is started an action later, or else one that a
    sender waits for at once. In the order of the actions, for messages of a channel are received as
    they are sent.
    """
    play = _Play(clocks, ahead)
    while play.goes_on() or play.is_helped():
        pass
    return [each.started for each in play.positions]


def soonest(clocks: Clocks, position: int, ahead: int = AHEAD) -> list[list[Action]]:
    """What the schedule alone proves to be early enough, and not too early: of usual lists, without
    more in flight or parts of the head, what ``receives`` finds."""
    own = clocks.schedule[position]
    found: list[list[Action]] = [[] for _ in own]
    for index, action in enumerate(own):
        proven = [clocks.ended(giver, position) for giver in clocks.givers(action)]
        if proven:
            found[max(0, index - ahead, *proven)].append(action)
    return found


@dataclass(slots=True)
class _Channel:
    """All ways to one kind of actions of a stage, which works on what comes over each of them at
    once. At both ends of a way a message starts once the one before it has arrived."""

    takers: list[Action] = field(default_factory=list)
    """What works on its messages, in their order."""
    sent: Counter[int] = field(default_factory=Counter)
    """By giving stage, how many have started there."""
    received: int = 0
    """How many have started here, over all ways together."""

    @property
    def come(self) -> int:
        """How many have arrived over all ways, as far as they are received."""
        return min(self.received, *self.sent.values())


@dataclass(slots=True)
class _Position:
    """What one position has asked for so far."""

    own: tuple[Action, ...]
    planned: list[list[Action]]
    """Before each action: the receives that are to start."""
    started: list[list[Action]]
    """And those that have."""
    due: deque[Action]
    """What is to start before its next action."""
    at: int = 0
    """Its next action."""


class _Play:
    """All positions, each as far as it comes."""

    def __init__(self, clocks: Clocks, ahead: int) -> None:
        self._clocks = clocks
        self._channels = defaultdict[tuple[int, str], _Channel](_Channel)
        self._over: dict[Action, tuple[_Channel, int]] = {}
        """By action: how its input comes, and the number of the message."""
        self._to = defaultdict[Action, list[_Channel]](list)
        """By action: where its result goes."""
        self._beside: list[set[int]] = [set() for _ in clocks.schedule]
        """By position: those that it sends to or receives from."""
        self.positions = [self._begun(clocks, p, ahead) for p in range(len(clocks.schedule))]
        self._awake = {*range(len(self.positions))}
        """Positions beside which something has happened since they were looked at."""

    def _begun(self, clocks: Clocks, number: int, ahead: int) -> _Position:
        own = tuple(clocks.schedule[number])
        planned = soonest(clocks, number, ahead)
        for action in own:
            givers = clocks.givers(action)
            if not givers:
                continue
            channel = self._channels[action.stage, action.kind]
            self._over[action] = channel, len(channel.takers)
            channel.takers.append(action)
            for giver in givers:
                channel.sent[giver.stage] = 0
                self._to[giver].append(channel)
                place, _ = clocks.place(giver)
                self._beside[number].add(place)
                self._beside[place].add(number)
        return _Position(own, planned, [[] for _ in own], deque(planned[0]))

    def goes_on(self) -> bool:
        """Every position does what it can; whether there was anything.

        In which order they do makes no difference: what one may do, another never prevents.
        """
        moved = [n for n in sorted(self._awake) if self._advance(self.positions[n])]
        self._awake = {near for number in moved for near in self._beside[number]}
        return bool(moved)

    def _advance(self, position: _Position) -> bool:
        before = position.at, len(position.due)
        while self._has_received(position) and position.at < len(position.own):
            action = position.own[position.at]
            channel, number = self._over.get(action, (None, 0))
            if channel is not None and channel.come <= number:
                break
            to = self._to.get(action, ())
            if any(each.sent[action.stage] > each.received for each in to):
                break
            for each in to:
                each.sent[action.stage] += 1
            position.at += 1
            if position.at < len(position.own):
                position.due.extend(position.planned[position.at])
        return before != (position.at, len(position.due))

    def _has_received(self, position: _Position) -> bool:
        """All receives before its next action have started."""
        while position.due and self._is_free(position.due[0]):
            self._receive(position, position.due.popleft())
        return not position.due

    def _is_free(self, action: Action) -> bool:
        """Its messages are next in their channel, and nothing is under way there."""
        channel, number = self._over[action]
        return channel.received == number == channel.come

    def _receive(self, position: _Position, action: Action) -> None:
        position.started[position.at].append(action)
        self._over[action][0].received += 1

    def is_helped(self) -> bool:
        """Nothing can go on: start one receive at another place. Whether there is one."""
        self._awake = {*range(len(self.positions))}
        held = [each for each in self.positions if each.due]
        for position in held:
            first = position.due[0]
            same = [a for a in position.due if self._over[a][0] is self._over[first][0]]
            assert position.own[position.at] not in same, f"{first} is received too late"
            position.due = deque(action for action in position.due if action not in same)
            position.planned[position.at + 1][:0] = same
            return True
        nearest = min(map(self._distance, self._busy()), default=None)
        if nearest is None:
            return False
        _, number, action = nearest
        position = self.positions[number]
        for later in (position.due, *position.planned[position.at + 1 :]):
            if action in later:
                later.remove(action)
        self._receive(position, action)
        return True

    def _busy(self) -> Iterator[_Channel]:
        """Where something waits to be received."""
        for channel in self._channels.values():
            if max(channel.sent.values()) > channel.received == channel.come:
                yield channel

    def _distance(self, channel: _Channel) -> tuple[int, int, Action]:
        """What a sender waits for: actions of its position before it, the position, and itself."""
        action = channel.takers[channel.received]
        position, index = self._clocks.place(action)
        return index - self.positions[position].at, position, action
