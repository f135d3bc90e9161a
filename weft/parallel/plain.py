"""Whether a linear layer is its product and no more: what computes that otherwise does no more."""

from __future__ import annotations

from torch import nn


def more_than_a_product(linear: nn.Linear) -> str:
    """What of a layer is lost where its product is computed otherwise, in words; "": nothing.

    Buffers and attributes are not, which a product does not read.
    """
    if "forward" in vars(linear):
        return "a forward of its own"
    if any(hooks for name, hooks in vars(linear).items() if name.endswith("_hooks")):
        return "hooks"
    if not {"weight", "bias"} <= linear._parameters.keys() or linear._parameters["weight"] is None:
        return "a weight or a bias that is computed"
    return ""
