"""What an agent keeps in memory: the newest state that all ranks of its machine have copied, and
what another machine has put here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.agent.image import Image
from weft.checkpoint.agent.peers import Facts
from weft.checkpoint.agent.wire import Copy, Save, State, Wire
from weft.checkpoint.entry import JSON


@dataclass(frozen=True, eq=False)
class KeptCopy:
    """The state of a rank."""

    image: Image
    guard: int


@dataclass(frozen=True, eq=False)
class Kept:
    """One save as this machine has it."""

    save: Save
    crew: str
    world_size: int
    state: Mapping[str, JSON]
    copies: Mapping[int, KeptCopy]
    """By rank."""


@dataclass(eq=False)
class _Put:
    """One save as another machine has it."""

    step: int
    world_size: int
    state: Mapping[str, JSON]
    copies: dict[int, KeptCopy] = field(default_factory=dict)


class Memory:
    """All that is kept, the oldest first. Several threads may use it.

    A state goes when one of its images is used again, or when a newer one is known to be whole on
    all machines: its crew begins the next. Of what earlier crews left only the state that somebody
    took last stays, once a crew has copied its own. What another machine has put here goes when a
    newer state of it is here.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: list[Kept] = []
        self._put: dict[str, _Put] = {}
        self._gone_on_from = ""
        """The save that somebody took last."""

    def __bool__(self) -> bool:
        return bool(self._kept or self._put)

    @property
    def num_bytes(self) -> int:
        """Of all images."""
        with self._lock:
            kept = [copy for each in self._kept for copy in each.copies.values()]
            put = [copy for each in self._put.values() for copy in each.copies.values()]
            return sum(len(copy.image) for copy in (*kept, *put))

    def add(self, kept: Kept) -> None:
        with self._lock:
            others = [each for each in self._kept if each.crew != kept.crew]
            taken = [each for each in others if each.save.name == self._gone_on_from]
            stays = (taken or others)[-1:]
            own = [each for each in self._kept if each.crew == kept.crew]
            self._kept = [*stays, *own, kept]

    def begins(self, crew: str, image: Image | None) -> None:
        """A rank of a crew begins to copy, into an image if it has that already."""
        with self._lock:
            newest = max((n for n, kept in enumerate(self._kept) if kept.crew == crew), default=0)
            self._kept = [
                kept
                for kept in self._kept[newest:]
                if all(copy.image is not image for copy in kept.copies.values())
            ]

    def take(self, facts: Facts, image: Image) -> None:
        """A copy of another machine's; the last one of a state takes the place of older ones."""
        with self._lock:
            made = _Put(facts["step"], facts["world_size"], facts["state"])
            put = self._put.setdefault(facts["name"], made)
            put.copies[facts["rank"]] = KeptCopy(image, facts["guard"])
            if facts["is_last"]:
                self._put = {facts["name"]: put}

    def give(self, name: str, rank: int) -> tuple[Image, int] | None:
        """A copy and its guard, if it is here."""
        with self._lock:
            copy = self._copies(name).get(rank)
            return None if copy is None else (copy.image, copy.guard)

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._put.clear()

    def offers(self) -> Sequence[Mapping[str, Any]]:
        with self._lock:
            found: dict[str, dict[str, Any]] = {}
            for kept in self._kept:
                found[kept.save.name] = {"step": kept.save.step, "world_size": kept.world_size}
            for name, put in self._put.items():
                found.setdefault(name, {"step": put.step, "world_size": put.world_size})
            return [
                {"name": name, **facts, "ranks": sorted(self._copies(name))}
                for name, facts in found.items()
            ]

    def hand_over(self, name: str, wire: Wire) -> None:
        """Send all that is here of a save."""
        with self._lock:
            self._gone_on_from = name
            copies = dict(sorted(self._copies(name).items()))
            states = [kept.state for kept in self._kept if kept.save.name == name]
            states += [self._put[name].state] if name in self._put else []
        state = states[0] if states else None
        wire.send(State(state=state, num_copies=len(copies)))
        for rank, copy in copies.items():
            image = copy.image
            message = Copy(rank=rank, pieces_bytes=image.pieces_bytes, guard=copy.guard)
            wire.send(message, files=[image.handle])

    def _copies(self, name: str) -> dict[int, KeptCopy]:
        found = dict(self._put[name].copies) if name in self._put else {}
        for kept in self._kept:
            found |= kept.copies if kept.save.name == name else {}
        return found
