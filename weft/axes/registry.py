"""The axes by name, in their order: outermost first where nothing else is said."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.axes.axis import Axis
from weft.axes.dp.axis import DataParallel
from weft.axes.tp.axis import TensorParallel
from weft.config.axes import NAMES

_KNOWN = {axis.name: axis for axis in (DataParallel(), TensorParallel())}

AXES: Mapping[str, Axis] = MappingProxyType({name: _KNOWN[name] for name in NAMES})
