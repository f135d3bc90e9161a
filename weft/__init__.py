"""Weft trains one large model on whatever accelerators a team has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.config.names import provide
from weft.version import __version__

if TYPE_CHECKING:
    from weft.api.distributed import distributed_model as distributed_model
    from weft.api.distributed import distributed_optimizer as distributed_optimizer
    from weft.api.layer_list import Layer as Layer
    from weft.api.layer_list import shared as shared
    from weft.api.layer_list import split as split
    from weft.api.run_view import Run as Run
    from weft.api.weave import weave as weave
    from weft.api.weave_layers import weave_layers as weave_layers

_MODULES = {
    "Layer": "weft.api.layer_list",
    "Run": "weft.api.run_view",
    "distributed_model": "weft.api.distributed",
    "distributed_optimizer": "weft.api.distributed",
    "shared": "weft.api.layer_list",
    "split": "weft.api.layer_list",
    "weave": "weft.api.weave",
    "weave_layers": "weft.api.weave_layers",
}
_REGISTRIES = {
    "families": "weft.models.registry:FAMILIES",
    "optimizers": "weft.optim.registry:OPTIMIZERS",
    "devices": "weft.platform.registry:PLATFORMS",
    "precisions": "weft.precision.registry:PRECISIONS",
    "recompute": "weft.recompute.registry:MODES",
    "schedules": "weft.schedules.registry:SCHEDULES",
}
"""Where the things are that a configuration names. They are imported when one is checked."""
for _kind, _address in _REGISTRIES.items():
    provide(_kind, _address)

__all__ = [
    "Layer",
    "Run",
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
