"""The modes by name. No torch."""

from __future__ import annotations

from weft.config.names import Registry
from weft.recompute.mode import Mode

MODES: Registry[Mode] = Registry(Mode, "weft.recompute", entry="MODE", group="weft.recompute_modes")
"""Every file beside this one that has a ``MODE``, and those of installed packages."""
