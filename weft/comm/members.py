"""Who takes part in a job: what each rank runs on, how far apart ranks are, how they can talk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from weft.platform.base import PointToPoint

if TYPE_CHECKING:
    import torch

WAYS: Sequence[PointToPoint] = get_args(PointToPoint)
"""From what can do least to what can do most."""
Link = Literal["chip", "node", "across"]
"""How far a call goes: within one chip, within one machine, from machine to machine."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the others must know of one rank."""

    family: str = "cpu"
    """Its kind of device, as PyTorch names it."""
    backend: str = "gloo"
    """The library of collectives that its family talks through, as PyTorch names it."""
    build: str = ""
    """Which build that is, as far as builds must be alike to talk to each other."""
    point_to_point: PointToPoint = "tagged"
    """How that sends from rank to rank; gloo knows tags."""
    node: str = ""
    """Its machine."""
    chip: str = ""
    """Its device on that machine; empty where processes share no device of their own."""


def farthest(members: Sequence[Member]) -> Link:
    """How far the call of a group goes: as far as any two of its ranks are apart."""
    if len({member.node for member in members}) > 1:
        return "across"
    chips = {(member.build, member.chip) for member in members}
    return "chip" if len(chips) == 1 and all(chip for _, chip in chips) else "node"


@dataclass(frozen=True, slots=True)
class Choice:
    """How the ranks of one group talk, and why."""

    backend: str
    point_to_point: PointToPoint = "tagged"
    """How it sends from rank to rank."""
    through_host: bool = False
    """Tensors go through host memory."""
    why: str = ""

    @property
    def ends_on_host(self) -> bool:
        """Its calls end when the host has waited for them, not when a device has."""
        return self.through_host or self.backend == "gloo"

    def __str__(self) -> str:
        if not self.through_host:
            return self.backend
        return f"{self.backend} through host memory, because {self.why}"


def choose(members: Sequence[Member], *, sends: bool = False) -> Choice:
    """The backend that all members share, or gloo through host memory, which everybody has.

    Libraries that PyTorch calls the same may be of different vendors.
    ``sends``: they send from rank to rank, and use no other collective.
    """
    backends = {member.backend for member in members}
    builds = sorted({member.build for member in members})
    families = sorted({member.family for member in members})
    if backends == {"none"}:
        return Choice("gloo", through_host=True, why=f"{' and '.join(families)} has no backend")
    if len(backends) == len(builds) == 1:
        backend = backends.pop()
        how = min((member.point_to_point for member in members), key=WAYS.index)
        if sends and how == "none":
            why = f"{backend} sends nothing from rank to rank"
            return Choice("gloo", through_host=True, why=why)
        return Choice(backend, how)
    unlike = [families, sorted(backends), builds]
    what = " and ".join(next(names for names in unlike if len(names) > 1))
    return Choice("gloo", through_host=True, why=f"{what} share no backend")


class Channel(NamedTuple):
    """What one rank sends another over a channel arrives in the order in which it was sent.

    That holds for every library of collectives, while tags that tell messages apart do not exist
    in all of them. So both ends must name their messages' order, not their tags.
    """

    ranks: tuple[int, ...]
    """Who may use it, ascending."""
    number: int
    """Tells apart the channels between the same ranks."""
    apart: bool = False
    """Nothing else waits for what is under way there: it has connections of its own."""


class Message(NamedTuple):
    """One tensor that a rank sends or receives over a channel."""

    channel: Channel
    size: tuple[int, ...]
    dtype: torch.dtype


Edge = tuple[int, int]
"""A rank that sends over a channel, and one that it sends to."""


def joined(rank: int, edges: Iterable[Edge]) -> tuple[int, ...]:
    """The ranks, ascending, that edges join with ``rank``, however far round."""
    beside: dict[int, set[int]] = {}
    for src, dst in edges:
        beside.setdefault(src, set()).add(dst)
        beside.setdefault(dst, set()).add(src)
    found, new = {rank}, {rank}
    while new:
        new = set().union(*(beside.get(each, ()) for each in new)) - found
        found |= new
    return tuple(sorted(found))


def in_words(ranks: Sequence[int]) -> str:
    """``ranks 0-3`` or ``ranks 1,2,5``."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and list(ranks) == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"
