"""The axes by name, in their order: outermost first where nothing else is said."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from weft.axes.axis import Axis
from weft.config.axes import NAMES

AXES: Mapping[str, Axis] = MappingProxyType(
    {name: import_module(f"weft.axes.{name}.axis").AXIS for name in NAMES}
)
"""Each from its folder."""
