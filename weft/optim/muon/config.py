"""What a configuration may say of Muon. No torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from weft.config.optim_sections import OptimConfig
from weft.config.values import Count, Flag, Fraction, Positive


class MuonConfig(OptimConfig):
    """Muon for the matrices of layers, AdamW for embeddings, the head, norms and biases; their
    learning rate over time, and gradient clipping."""

    kind: Literal["muon"] = "muon"
    """Which optimizer this is."""
    momentum: Fraction = 0.95
    """Decay of the running mean of a matrix's gradient."""
    nesterov: Flag = True
    """The newest gradient counts once more beside its running mean."""
    newton_schulz_steps: Annotated[Count, Field(le=20)] = 5
    """Iterations that make a matrix orthogonal, about."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How `lr` becomes that of a matrix: "match_rms_adamw" makes its updates as large as AdamW's,
    so that one `lr` does for all; "original" is the longer the taller a matrix is beyond its width,
    and wants an `lr` about 20 times as large, with `lr_scale` of groups for the rest."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Of AdamW: decay of the running mean of the gradient and of its square."""
    eps: Positive = 1e-8
    """Of AdamW: added to the root of the mean square before dividing by it."""

    def rehearsed(self, eps: float, /) -> Self:
        return self.model_copy(update={"eps": eps})

    @property
    def least_divisor(self) -> float:
        return self.eps
