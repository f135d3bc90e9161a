"""What goes wrong between processes."""

from __future__ import annotations

from weft.config.errors import RunError


class CommError(RunError):
    """A collective failed here, usually because another rank died or stalled."""
