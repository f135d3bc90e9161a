"""Attention's core again, from queries, keys and values (arXiv 2205.05198).

It saves the scores where they are in memory: in Weft on a processor, up to 512 tokens. Fused
kernels, and blocks of queries beyond that length, keep none, so that nothing is saved there.
"""

from __future__ import annotations

from weft.recompute.mode import Mode

GOES_ROUND = "attention as keys go round"
"""An operation of processors, whose attention is in parts there, which they put together."""
CORE = {"attention": 1.0, GOES_ROUND: 1.0, "scores": 1.0, "values": 1.0, "softmax": 1.0}
MODE = Mode(
    name="core",
    order=2,
    keeps="queries, keys and values",
    drops="attention's scores, where they are in memory",
    part="core",
    branch="attention",
    items=frozenset({"scores"}),
    again=CORE,
    forward=0.1,
)
