"""Tensor parallelism at work."""

from __future__ import annotations

from weft.parallel.division import CHANGES
from weft.parallel.runtime import Runtime
from weft.parallel.tp.modules import SPLIT_FORMS
from weft.parallel.tp.pieces import InPieces

RUNTIME = Runtime(CHANGES, SPLIT_FORMS, InPieces)
