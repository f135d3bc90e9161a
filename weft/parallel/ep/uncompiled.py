"""What compiled code calls and does not look into.

Imported only then: PyTorch's compiler takes seconds to import, and most runs do not compile.
"""

from collections.abc import Sequence

import torch

from weft.nn.experts.grouped import Visit
from weft.parallel import trips
from weft.parallel.ep.exchange import Exchange

WAYS: trips.Ways = (torch.compiler.disable(trips.begin), torch.compiler.disable(trips.end))  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def visits(exchange: Exchange, ends: Sequence[torch.Tensor]) -> list[Visit]:
    """As the exchange's."""
    return exchange.visits(ends, WAYS)
