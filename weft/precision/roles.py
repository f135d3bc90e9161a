"""What a precision says of itself: a dtype and a place to keep it for every role of a number.

Precisions are looked up where plans are made, so torch is imported only when a dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Literal, get_args

from weft.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""Where tensors of a role may be kept."""

Scaling = Literal["tensorwise", "rowwise", "blockwise", "delayed"]
"""What numbers have one scale: those of a sample, or of a weight; those that one sum of a product
is over; blocks of them; all of a step, by what earlier steps had."""

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of a dtype: half the distance from 1 to the next number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Factors of the products of linear layers in eight bits (arXiv 2209.05433).

    Each is scaled by a power of two, made of the numbers it has at that moment, so that the largest
    is near the largest that there is. What has one scale is a part of the unsplit model and of one
    sample, so numbers depend on no plan. Delayed scales are made of the largest that all ranks had
    in some steps before.
    """

    scaling: Scaling
    factors: str = "float8_e4m3fn"
    """Dtype in torch of activations and weights."""
    gradients: str = "float8_e5m2"
    block: int = 128
    """Elements along a side of a block."""

    @property
    def rounds_weights_once(self) -> bool:
        """All products read the same rounding of a weight, and nothing else of it: its scales are
        of the whole weight or of its blocks, and of what it is at that moment."""
        return self.scaling in ("tensorwise", "blockwise")


@dataclass(frozen=True, slots=True)
class Role:
    """How the numbers of one role are stored."""

    stored_as: str
    """Name of the dtype in torch."""
    tier: Tier = "device"
    """``device``: in the memory of the chip that computes."""
    folder: str | None = None
    """Where files of ``disk`` are; None: where the system has its temporary ones."""

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found = vars(torch)[self.stored_as]
        assert isinstance(found, torch.dtype), f"{self.stored_as} is no dtype of torch"
        return found


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
    products: Products | None = None
    """How linear layers of blocks multiply; None: in the arithmetic of all else."""

    @property
    def has_fast_products(self) -> bool:
        """Chips' units for numbers of eight bits make its products, where they have any."""
        if self.products is None or self.products.scaling == "blockwise":
            return False
        return self.compute.stored_as == "bfloat16"

    @property
    def roundoff(self) -> float:
        """What one rounding puts between two ways of computing the same, relative to the result.

        A factor in eight bits differs between the two by a whole rounding ``r`` where a difference
        ``u`` of what it was before moved it over the middle of two numbers. That is one in ``r/u``
        of them, which on average is ``sqrt(r u)``.
        """
        found = ROUNDOFF[self.compute.stored_as]
        return found if self.products is None else sqrt(found * 2.0**-3)

    @property
    def sum_roundoff(self) -> float:
        """Of the format in which products are added up."""
        return min(ROUNDOFF[self.compute.stored_as], ROUNDOFF["float32"])

    def updating_in(self, tier: Tier, folder: str | None) -> Roles:
        """The same, where what only updates need is kept in a tier."""
        master = replace(self.master, tier=tier, folder=folder)
        return replace(self, master=master, state=replace(self.state, tier=tier, folder=folder))

    def computing_from(self, tier: Tier, folder: str | None) -> Roles:
        """The same, where parameters are kept in a tier until something computes with them."""
        return replace(self, parameters=replace(self.parameters, tier=tier, folder=folder))

    def adding_up_in(self, tier: Tier, folder: str | None) -> Roles:
        """The same, where gradients are added up in a tier."""
        return replace(self, accumulation=replace(self.accumulation, tier=tier, folder=folder))

    def kept_in(self, tier: Tier) -> Roles:
        """The same of what is in a tier as a whole; its folder is that of what updates need."""
        if tier == "device":
            return self
        apart = partial(replace, tier=tier, folder=self.master.folder)
        return replace(
            self,
            parameters=apart(self.parameters),
            accumulation=apart(self.accumulation),
            master=apart(self.master),
            state=apart(self.state),
        )

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
    def of(
        name: str,
        order: int,
        low: str,
        high: str,
        *,
        scales_loss: bool = False,
        products: Scaling | None = None,
    ) -> Roles:
        """Arithmetic in ``low``; what is summed over many terms or many steps in ``high``.
        ``products``: linear layers multiply in eight bits, scaled so."""
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
            products=None if products is None else Products(scaling=products),
        )
