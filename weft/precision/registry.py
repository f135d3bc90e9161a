"""The precisions by name. No torch."""

from __future__ import annotations

from weft.config.names import Registry
from weft.precision.roles import Roles

PRECISIONS: Registry[Roles] = Registry("weft.precision", entry="PRECISION", group="weft.precisions")
"""Every file beside this one that has a ``PRECISION``, and those of installed packages."""
