"""The whole feed-forward branch again but its last product, from what enters its norm."""

from __future__ import annotations

from weft.recompute.activation import MODE as ACTIVATION
from weft.recompute.mode import Mode

MODE = Mode(
    name="feed_forward",
    order=4,
    keeps="what enters the feed-forward's norm",
    drops="the norm's result and all that the feed-forward makes of it",
    part="feed_forward",
    branch="feed_forward",
    items=frozenset({"ff read", "gates", "hidden"}),
    again={
        **ACTIVATION.again,
        "up": 1.0,
        "router": 1.0,
        "expert up": 1.0,
        "shared up": 1.0,
        "norms and residuals": 0.2,
    },
    gathers=1,
    forward=0.5,
    covers=frozenset({ACTIVATION.name}),
)
