"""What ranks import is imported here, before they fork: half a second and more for each of them.

PyTorch imports the last, and sympy with it, in the first backward pass.
"""

import torch.fx.experimental.symbolic_shapes  # noqa: F401

import weft.train.worker  # noqa: F401
from weft.config.names import import_ours

import_ours()
