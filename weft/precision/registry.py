"""The precisions by name. No torch."""

from __future__ import annotations

from weft.config.names import Registry
from weft.precision.roles import Roles

PRECISIONS: Registry[Roles] = Registry(
    Roles, "weft.precision", entry="PRECISION", group="weft.precisions"
)
"""Every file beside this one that has a ``PRECISION``, and those of installed packages."""


def reference_of(name: str) -> str:
    """The precision that multiplies in the same eight bits and does all else in fp64; the same
    where there is none."""
    own = PRECISIONS[name].products
    alike = (n for n, each in PRECISIONS.items() if own is not None and each.products == own)
    return next((n for n in alike if PRECISIONS[n].compute.stored_as == "float64"), name)


def scales_delayed(name: str) -> bool:
    """Products have scales of earlier steps."""
    products = PRECISIONS[name].products
    return products is not None and products.scaling == "delayed"
