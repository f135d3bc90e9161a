"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.optim.kind import Kind
from weft.optim.muon.config import MuonConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


def moved_bytes(config: MuonConfig) -> float:
    """Of a matrix: momentum, what is taken over of it, and the new value; each step of the
    polynomial, three products in two bytes. The time of these products comes on top."""
    return 90 + 8 * config.newton_schulz_steps


def reference(config: MuonConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Written out a second time: PyTorch's own computes in bf16 whatever its parameters are."""
    from weft.optim.muon.reference import ByDecomposition

    return ByDecomposition(config, groups)


RULE = "weft.optim.muon.rule:Muon"

OPTIMIZER = Kind(
    name="muon",
    order=3,
    config=MuonConfig,
    rule=RULE,
    moved_bytes=moved_bytes,
    reference=reference,
)
