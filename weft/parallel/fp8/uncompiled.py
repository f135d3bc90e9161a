"""What compiled code calls and does not look into: it talks to other ranks, and counts that.

Imported only then, as PyTorch's compiler takes seconds to import.
"""

import torch

from weft.parallel.fp8.experts import GroupedMultiply
from weft.parallel.fp8.linear import Multiply

multiply = torch.compiler.disable(Multiply.apply)  # type: ignore[no-untyped-call]
multiply_grouped = torch.compiler.disable(GroupedMultiply.apply)  # type: ignore[no-untyped-call]
