"""The feed-forward some tokens at a time: what it makes of all of them is never there at once.

That is most of what a layer needs while it computes long samples (arXiv 2001.04451, 2305.19370).
Forward and the gradient of what enters are those of all tokens; gradients of weights are sums over
chunks, as they are over micro-batches.
"""

from __future__ import annotations

from weft.recompute.activation import MODE as ACTIVATION
from weft.recompute.mode import Mode

MODE = Mode(
    name="chunks",
    order=7,
    keeps="what the feed-forward's first products read",
    drops="what they make of it, of which no more than 2048 tokens' is there at once",
    part="by_token",
    branch="feed_forward",
    chunk_tokens=2048,
    items=frozenset({"gates", "hidden"}),
    again={**ACTIVATION.again, "up": 1.0, "shared up": 1.0},
    forward=0.3,
    covers=frozenset({ACTIVATION.name}),
)
