"""What compiled code calls and does not look into.

Imported only then: PyTorch's compiler takes seconds to import, and most runs do not compile.
"""

import torch

from weft.parallel.pair import Pair

pair = torch.compiler.disable(Pair.apply)  # type: ignore[no-untyped-call]
