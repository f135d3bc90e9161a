"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.optim.kind import Kind
from weft.optim.muon.config import MuonConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


def reference(config: MuonConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Written out a second time: PyTorch's own computes in bf16 whatever its parameters are."""
    from weft.optim.muon.reference import ByDecomposition

    return ByDecomposition(config, groups)


RULE = "weft.optim.muon.rule:Muon"

OPTIMIZER = Kind(name="muon", order=3, config=MuonConfig, rule=RULE, reference=reference)
