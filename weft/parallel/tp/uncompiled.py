"""What compiled code calls and does not look into.

Imported only then: PyTorch's compiler takes seconds to import, and most runs do not compile.
"""

import torch

from weft.parallel import trips

WAYS: trips.Ways = (torch.compiler.disable(trips.begin), torch.compiler.disable(trips.end))  # type: ignore[no-untyped-call]
products = torch.compiler.disable(trips.products, recursive=False)  # type: ignore[no-untyped-call]
through = torch.compiler.disable(trips.through, recursive=False)  # type: ignore[no-untyped-call]
"""Runs as it is, and what it calls is compiled apart."""
