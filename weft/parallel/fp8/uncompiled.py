"""What compiled code calls and does not look into: it talks to other ranks, and counts that, or
takes note of what it sees.

Imported only then, as PyTorch's compiler takes seconds to import.
"""

import torch
from torch import Tensor, library

from weft.parallel.fp8.experts import GroupedMultiply
from weft.parallel.fp8.history import note
from weft.parallel.fp8.linear import Multiply

multiply = torch.compiler.disable(Multiply.apply)  # type: ignore[no-untyped-call]
multiply_grouped = torch.compiler.disable(GroupedMultiply.apply)  # type: ignore[no-untyped-call]

_LIBRARY = library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("noted(Tensor largest, Tensor seen) -> Tensor")  # type: ignore[no-untyped-call]


def _noted(largest: Tensor, seen: Tensor) -> Tensor:
    """``seen`` as ``data``: a block keeps it for its backward, which takes note there too, and is
    not to find another version of it."""
    note(largest, seen.data)
    return largest.clone()


def _form(largest: Tensor, _seen: Tensor) -> Tensor:
    return torch.empty_like(largest)


_LIBRARY.impl("noted", _noted, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
library.register_fake("weft::noted", _form)


def noted(largest: Tensor, seen: Tensor) -> Tensor:
    """The same numbers, once they are taken note of: who goes on with them has that done."""
    made: Tensor = torch.ops.weft.noted(largest, seen)
    return made
