"""The feed-forward's activation again, from what its first products made: no product twice."""

from __future__ import annotations

from weft.recompute.mode import Mode

MODE = Mode(
    name="activation",
    order=1,
    keeps="what the feed-forward's activation reads",
    drops="what its last product reads",
    part="activation",
    branch="feed_forward",
    items=frozenset({"hidden"}),
    again={"activation": 1.0, "plain activation": 1.0, "activation and permutation": 1.0},
    forward=0.1,
)
