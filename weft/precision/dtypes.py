"""The dtypes behind the names of precisions."""

from __future__ import annotations

import torch

from weft.plan.plan import Precision

MODEL_DTYPE: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
"""What parameters, activations and their gradients are computed in."""

MAIN_DTYPE: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
}
"""What gradients are accumulated and reduced in, and what the optimizer updates."""
