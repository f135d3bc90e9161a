"""What compiled code calls and does not look into.

Imported only then: PyTorch's compiler takes seconds to import, and most runs do not compile.
"""

import torch

from weft.nn.experts.grouped import Visit
from weft.parallel.ep.exchange import Exchange


@torch.compiler.disable  # type: ignore[untyped-decorator]
def visit(exchange: Exchange, ends: torch.Tensor) -> Visit:
    """As the exchange's."""
    return exchange.visit(ends)
