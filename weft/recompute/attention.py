"""The whole attention branch again but its last product, from what enters its norm."""

from __future__ import annotations

from weft.recompute.core import CORE
from weft.recompute.mode import Mode

MODE = Mode(
    name="attention",
    order=3,
    keeps="what enters attention's norm",
    drops="the norm's result, queries, keys, values, scores and attention's result",
    part="attention",
    branch="attention",
    items=frozenset({"attention read", "heads", "latent", "scores"}),
    again={
        **CORE,
        "qkv": 1.0,
        "latent down": 1.0,
        "query up": 1.0,
        "value up": 1.0,
        "norms and residuals": 0.2,
    },
    gathers=1,
    forward=0.5,
    covers=frozenset({"core"}),
)
