"""A one-way road between ranks, on which messages need no name: they keep their order."""

from __future__ import annotations

from typing import NamedTuple


class Channel(NamedTuple):
    """What one rank sends another over a channel arrives in the order in which it was sent.

    That holds for every library of collectives, while tags that tell messages apart do not exist
    in all of them. So both ends must name their messages' order, not their tags.
    """

    ranks: tuple[int, ...]
    """Who may use it, ascending."""
    number: int
    """Tells apart the channels between the same ranks."""
