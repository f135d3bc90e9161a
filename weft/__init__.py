"""Weft trains one large model on whatever accelerators a team has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.version import __version__

if TYPE_CHECKING:
    from weft.train.weave import weave as weave

__all__ = ["__version__", "weave"]


def __getattr__(name: str) -> Any:
    """Load PyTorch only when something that needs it is asked for."""
    if name == "weave":
        from weft.train.weave import weave

        return weave
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
