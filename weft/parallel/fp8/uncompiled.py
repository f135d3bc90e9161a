"""What compiled code calls and does not look into: it talks to other ranks, and counts that, or
takes note of what it sees.

Imported only then, as PyTorch's compiler takes seconds to import.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.parallel.fp8.experts import GroupedMultiply
from weft.parallel.fp8.history import Known, scale_and_note
from weft.parallel.fp8.linear import Multiply

multiply = torch.compiler.disable(Multiply.apply)  # type: ignore[no-untyped-call]
multiply_grouped = torch.compiler.disable(GroupedMultiply.apply)  # type: ignore[no-untyped-call]

_LIBRARY = torch.library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "delayed_scale(Tensor largest, Tensor[] known, ScalarType dtype) -> Tensor"
)


def _delayed_scale(largest: Tensor, known: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One for each of the largest, whether they differ or not: a block is compiled for one form.

    ``seen`` as ``data``: a block keeps it for its backward, which takes note there too, and is not
    to find another version of it.
    """
    seen, *others = known
    scale = scale_and_note(largest, Known(seen.data, *others), dtype)
    return scale.expand(largest.shape).clone()


def _form(largest: Tensor, _known: Sequence[Tensor], _dtype: torch.dtype) -> Tensor:
    return largest.new_empty(largest.shape, dtype=torch.float32)


_LIBRARY.impl("delayed_scale", _delayed_scale, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("weft::delayed_scale", _form)


def delayed_scale(largest: Tensor, known: Known, dtype: torch.dtype) -> Tensor:
    """As ``scale_and_note``, in compiled code."""
    made: Tensor = torch.ops.weft.delayed_scale(largest, list(known), dtype)
    return made
