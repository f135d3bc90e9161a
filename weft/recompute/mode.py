"""What a way to recompute says of itself: what it wraps, what it drops, what it does again.

A layer keeps some items from its forward to its backward (``weft.cost.activations`` counts their
bytes) and is made of operations (``weft.cost.operators`` counts their time). A mode names those
that it drops and those that backward does again for it: all costs follow. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Item = Literal[
    "input",
    "attention masks",
    "attention read",
    "heads",
    "latent",
    "scores",
    "ff input",
    "ff masks",
    "ff read",
    "gates",
    "hidden",
]
"""What a layer keeps, in the order of its forward: what enters it, dropout's masks, what products
read (norms' results), queries, keys, values and what attention makes of them, scores, what enters
the feed-forward branch, what its activation reads, and the rest up to its last product."""
NOTHING: Mapping[str, float] = MappingProxyType({})
ANY = "*"
"""Every operation of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A file in ``weft/recompute`` holds one as ``MODE``."""

    name: str
    order: int
    """Place where modes are listed."""
    keeps: str
    """In words, of what it is applied to: what stays in memory."""
    drops: str
    """Likewise: what backward makes again."""
    part: str = ""
    """What it wraps: a part that blocks name (``weft.nn.stage.Part``); empty: the whole block."""
    branch: Literal["", "attention", "feed_forward"] = ""
    """Of a layer, where that part lies; empty: in both. It does nothing to a layer without it."""
    chunk_tokens: int = 0
    """Tokens of a rank that what it wraps takes at once at most; it looks at each alone. 0: all."""
    items: frozenset[Item] = frozenset()
    """What it drops."""
    again: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """Operations that backward does again, and what part of each; ``ANY`` is all."""
    gathers: int = 0
    """Gathers before divided products that backward does again, of a layer's two."""
    scatters: int = 0
    """Likewise the sums after them."""
    forward: float = 0.0
    """Part of a layer's launches and messages that backward does again, as its time counts them."""
    waits: Literal["device", "host", "disk"] = "device"
    """Where what a layer keeps does so until backward."""
    covers: frozenset[str] = frozenset()
    """Modes that do nothing more in a layer where this one is."""

    @property
    def is_on(self) -> bool:
        """Anything is computed again."""
        return bool(self.items)

    @property
    def offloads(self) -> bool:
        """What a layer keeps is not on the device meanwhile."""
        return self.waits != "device"

    def repeats(self, op: str) -> float:
        """What part of an operation is done again."""
        return self.again.get(op, self.again.get(ANY, 0.0))
