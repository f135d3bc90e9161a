"""What compiled code calls and does not look into.

Imported only then: PyTorch's compiler takes seconds to import, and most runs do not compile.
"""

import torch

from weft.nn.documents import Packed
from weft.parallel.cp.ulysses import Attend


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed | None
) -> torch.Tensor:
    """As ``attend``."""
    return attend(q, k, v, packed)
