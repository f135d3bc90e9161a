"""What each named precision means: a dtype and a place to keep it for every role of a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weft.config.errors import ConfigError
from weft.plan.plan import Precision

TIERS = ("device",)
"""Where tensors of a role may be kept."""


@dataclass(frozen=True, slots=True)
class Role:
    """How the numbers of one role are stored."""

    dtype: torch.dtype
    tier: str = "device"
    """``device``: in the memory of the chip that computes."""

    def place(self, device: torch.device) -> torch.device:
        """Where a rank that computes on ``device`` keeps tensors of this role."""
        return device


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """One precision. Gradients are accumulated, reduced and handed to the optimizer in this order;
    each step converts where the next role has another dtype.

    Raises:
        ConfigError: a tier that does not exist, or parameters in another dtype than the arithmetic.
    """

    name: str
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
        if self.parameters.dtype != self.compute.dtype:
            key = f"precision.{self.name}.parameters"
            expected = f"{self.compute.dtype}, as the arithmetic"
            raise ConfigError(key, str(self.parameters.dtype), expected)

    @staticmethod
    def of(name: str, low: torch.dtype, high: torch.dtype) -> Roles:
        """Arithmetic in ``low``; what is summed over many terms or many steps in ``high``."""
        small, wide = Role(low), Role(high)
        return Roles(
            name=name,
            compute=small,
            parameters=small,
            accumulation=wide,
            reduction=wide,
            master=wide,
            state=wide,
        )


PRECISIONS: Mapping[Precision, Roles] = MappingProxyType(
    {
        "fp64": Roles.of("fp64", torch.float64, torch.float64),
        "fp32": Roles.of("fp32", torch.float32, torch.float32),
        "bf16": Roles.of("bf16", torch.bfloat16, torch.float32),
    }
)
"""By the name that a plan gives."""
