"""Weft trains one large model on whatever accelerators a team has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.version import __version__

if TYPE_CHECKING:
    from weft.train.distributed import distributed_model as distributed_model
    from weft.train.distributed import distributed_optimizer as distributed_optimizer
    from weft.train.layer_engine import weave_layers as weave_layers
    from weft.train.layer_list import Layer as Layer
    from weft.train.layer_list import shared as shared
    from weft.train.layer_list import split as split
    from weft.train.weave import weave as weave

_MODULES = {
    "Layer": "weft.train.layer_list",
    "distributed_model": "weft.train.distributed",
    "distributed_optimizer": "weft.train.distributed",
    "shared": "weft.train.layer_list",
    "split": "weft.train.layer_list",
    "weave": "weft.train.weave",
    "weave_layers": "weft.train.layer_engine",
}
__all__ = [
    "Layer",
    "__version__",
    "distributed_model",
    "distributed_optimizer",
    "shared",
    "split",
    "weave",
    "weave_layers",
]


def __getattr__(name: str) -> Any:
    """Load PyTorch only when something that needs it is asked for."""
    if name in _MODULES:
        return import_module(_MODULES[name]).__dict__[name]
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
