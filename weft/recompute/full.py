"""Whole layers again, from what enters them (arXiv 1604.06174)."""

from __future__ import annotations

from typing import get_args

from weft.recompute.mode import ANY, Item, Mode

MODE = Mode(
    name="full",
    order=5,
    keeps="what enters the layer",
    drops="all that the layer makes of it",
    items=frozenset(get_args(Item)) - {"input"},
    again={ANY: 1.0},
    gathers=2,
    scatters=1,
    forward=1.0,
    covers=frozenset(
        {"core", "attention", "activation", "feed_forward", "offload", "offload_disk"}
    ),
)
