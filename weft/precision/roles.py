"""What a precision says of itself: a dtype and a place to keep it for every role of a number.

Precisions are looked up where plans are made, so torch is imported only when a dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

TIERS = ("device",)
"""Where tensors of a role may be kept."""


@dataclass(frozen=True, slots=True)
class Role:
    """How the numbers of one role are stored."""

    stored_as: str
    """Name of the dtype in torch."""
    tier: str = "device"
    """``device``: in the memory of the chip that computes."""

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found = vars(torch)[self.stored_as]
        assert isinstance(found, torch.dtype), f"{self.stored_as} is no dtype of torch"
        return found

    def place(self, device: torch.device) -> torch.device:
        """Where a rank that computes on ``device`` keeps tensors of this role."""
        return device


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """One precision; a file in ``weft/precision`` holds one as ``PRECISION``.

    Gradients are accumulated, reduced and handed to the optimizer in this order; each step
    converts where the next role has another dtype.

    Raises:
        ConfigError: a tier that does not exist, or parameters in another dtype than the arithmetic.
    """

    name: str
    order: int
    """Place where precisions are listed."""
    compute: Role
    """Arithmetic of forward and backward, activations, and what crosses stage borders."""
    parameters: Role
    """Parameters as the model computes with them."""
    accumulation: Role
    """Gradients as they are added up over micro-batches."""
    reduction: Role
    """Gradients as they travel between ranks."""
    master: Role
    """What the optimizer updates; the parameters themselves where the dtypes agree."""
    state: Role
    """What the optimizer keeps for each parameter."""
    scales_loss: bool = False
    """Gradients are too small for the arithmetic, so the loss is scaled; steps whose gradients are
    then too large are skipped, on all ranks alike."""

    def by_role(self) -> dict[str, Role]:
        """Role -> how its numbers are stored."""
        return {
            "compute": self.compute,
            "parameters": self.parameters,
            "accumulation": self.accumulation,
            "reduction": self.reduction,
            "master": self.master,
            "state": self.state,
        }

    def __post_init__(self) -> None:
        for name, role in self.by_role().items():
            if role.tier not in TIERS:
                key = f"precision.{self.name}.{name}.tier"
                raise ConfigError(key, role.tier, " or ".join(map(repr, TIERS)))
        if self.parameters.stored_as != self.compute.stored_as:
            key = f"precision.{self.name}.parameters"
            expected = f"torch.{self.compute.stored_as}, as the arithmetic"
            raise ConfigError(key, f"torch.{self.parameters.stored_as}", expected)

    @staticmethod
    def of(name: str, order: int, low: str, high: str, *, scales_loss: bool = False) -> Roles:
        """Arithmetic in ``low``; what is summed over many terms or many steps in ``high``."""
        small, wide = Role(low), Role(high)
        return Roles(
            name=name,
            order=order,
            compute=small,
            parameters=small,
            accumulation=wide,
            reduction=wide,
            master=wide,
            state=wide,
            scales_loss=scales_loss,
        )
