"""What ranks import is imported here, before they fork: half a second and more for each of them.

PyTorch imports the last, and sympy with it, in the first backward pass.
"""

from weft.config.imports import uncollected
from weft.config.names import import_ours

with uncollected():
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import weft.train.worker  # noqa: F401

    import_ours()
