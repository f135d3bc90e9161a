"""Who takes part in a job: what each rank runs on, how far apart ranks are, how they can talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Link = Literal["chip", "node", "across"]
"""How far a call goes: within one chip, within one machine, from machine to machine."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the others must know of one rank."""

    family: str = "cpu"
    """Its kind of device, as PyTorch names it."""
    backend: str = "gloo"
    """The library of collectives that its family talks through, as PyTorch names it."""
    library: str = ""
    """Which build that is, as far as builds must be alike to talk to each other."""
    node: str = ""
    """Its machine."""
    chip: str = ""
    """Its device on that machine; empty where processes share no device of their own."""


def farthest(members: Sequence[Member]) -> Link:
    """How far the call of a group goes: as far as any two of its ranks are apart."""
    if len({member.node for member in members}) > 1:
        return "across"
    chips = {member.chip for member in members}
    return "chip" if len(chips) == 1 and "" not in chips else "node"


@dataclass(frozen=True, slots=True)
class Choice:
    """How the ranks of one group talk, and why."""

    backend: str
    through_host: bool = False
    """Tensors go through host memory."""
    why: str = ""

    def __str__(self) -> str:
        if not self.through_host:
            return self.backend
        return f"{self.backend} through host memory, because {self.why}"


def choose(members: Sequence[Member]) -> Choice:
    """The backend that all members share, or gloo through host memory, which everybody has.

    Libraries that PyTorch calls the same may be of different vendors.
    """
    backends = {member.backend for member in members}
    libraries = sorted({member.library for member in members})
    families = sorted({member.family for member in members})
    if backends == {"none"}:
        return Choice("gloo", through_host=True, why=f"{' and '.join(families)} has no backend")
    if len(backends) == len(libraries) == 1:
        return Choice(backends.pop())
    unlike = [families, sorted(backends), libraries]
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


def in_words(ranks: Sequence[int]) -> str:
    """``ranks 0-3`` or ``ranks 1,2,5``."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and list(ranks) == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"
