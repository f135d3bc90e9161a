"""What goes wrong between processes."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective failed here, usually because another rank died or stalled."""
