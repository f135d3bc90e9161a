"""The shortest step of a small pipeline, by trying every order; shares no code with the package's.

One stage a position. Orders are tried in the order in which actions begin; of two beginnings that
have done the same, one that is nowhere earlier is dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.simulate.made.make import Making


class Times(NamedTuple):
    """Of a stage: forward, input gradient, weight gradient; whole numbers."""

    forward: int
    inputs: int
    weights: int


class Way(NamedTuple):
    """Over a border: how long the wire is busy, and how much later it is there."""

    transfer: int
    latency: int


@dataclass(frozen=True)
class State:
    """Everything that matters for what can follow."""

    done: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]
    coming: tuple[tuple[int, ...], ...]
    """By position: when inputs of forwards are there; then likewise of backwards."""
    wires: tuple[int, ...]
    begun: int
    """The last action of all."""


@dataclass(frozen=True)
class Small:
    """A small pipeline."""

    stages: Sequence[Times]
    ways: Sequence[Way]
    many: int
    room: Sequence[int]
    split: bool

    def takes(self, place: int, kind: int) -> int:
        times = self.stages[place]
        if not self.split:
            return (times.forward, times.inputs + times.weights)[kind]
        return times[kind]

    def shortest(self, known: int) -> int:
        """The length of the shortest step, or ``known`` where none is shorter."""
        places = range(len(self.stages))
        kinds = 3 if self.split else 2
        start = State(
            done=((0,) * kinds,) * len(places),
            free=(0,) * len(places),
            coming=((0,) * self.many, *((),) * (2 * len(places) - 1)),
            wires=(0,) * (2 * len(places)),
            begun=0,
        )
        best = known
        seen: dict[object, list[tuple[int, ...]]] = {}
        stack = [start]
        while stack:
            state = stack.pop()
            left = [
                sum((self.many - n) * self.takes(p, k) for k, n in enumerate(state.done[p]))
                for p in places
            ]
            if not any(left):
                best = min(best, max(state.free))
                continue
            bound = max(free + rest for free, rest in zip(state.free, left, strict=True))
            if bound >= best or self.is_no_better(state, seen):
                continue
            stack += sorted(self.nexts(state), key=lambda each: -each.begun)
        return best

    def is_no_better(self, state: State, seen: dict[object, list[tuple[int, ...]]]) -> bool:
        key = state.done, tuple(map(len, state.coming))
        moments = (*state.free, *sum(state.coming, ()), *state.wires, state.begun)
        others = seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, moments, strict=True)) for other in others):
            return True
        others.append(moments)
        return False

    def nexts(self, state: State) -> Iterator[State]:
        for place, done in enumerate(state.done):
            for kind in range(len(done)):
                if kind == 2:
                    ready = state.free[place] if done[1] > done[2] else None
                else:
                    queue = state.coming[2 * place + kind]
                    ready = queue[0] if queue else None
                if kind == 0 and done[0] - done[-1] >= self.room[place]:
                    ready = None
                if ready is not None and max(ready, state.free[place]) >= state.begun:
                    yield self.after(state, place, kind, max(ready, state.free[place]))

    def after(self, state: State, place: int, kind: int, start: int) -> State:
        end = start + self.takes(place, kind)
        done = list(state.done[place])
        done[kind] += 1
        coming, wires = list(state.coming), list(state.wires)
        if kind < 2:
            coming[2 * place + kind] = coming[2 * place + kind][1:]
            target = place + 1 if kind == 0 else place - 1
            if kind == 0 and target == len(self.stages):
                coming[2 * place + 1] += (end,)
            elif target >= 0:
                way = self.ways[min(place, target)]
                wires[2 * place + kind] = max(end, wires[2 * place + kind]) + way.transfer
                coming[2 * target + kind] += (wires[2 * place + kind] + way.latency,)
        return State(
            done=(*state.done[:place], tuple(done), *state.done[place + 1 :]),
            free=(*state.free[:place], end, *state.free[place + 1 :]),
            coming=tuple(coming),
            wires=tuple(wires),
            begun=start,
        )


def small_of(making: Making) -> Small:
    """What a list is made for, of whole numbers; one stage a position."""
    return Small(
        stages=[
            Times(int(each.forward_s), int(each.input_grad_s), int(each.weight_grad_s))
            for each in making.stages
        ],
        ways=[Way(int(each.transfer_s), int(each.latency_s)) for each in making.borders],
        many=making.pipeline.num_microbatches,
        room=making.room,
        split="zb-h1" in making.names,
    )
