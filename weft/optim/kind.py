"""What an optimizer says of itself. No torch until one is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.config.optim_sections import OptimConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from weft.optim.rule import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """An entry of the registry."""

    name: str
    order: int
    """Place where optimizers are listed; the first is what a configuration names none of."""
    config: type[OptimConfig] | None = None
    """Its section of a configuration, whose ``kind`` is its name; None: for programs alone.
    Where updates are made of a gradient's sign or by its size, ``least_divisor`` says so, and
    ``rehearsed`` how ``weft verify`` keeps rounding noise out of them."""
    rule: Callable[[Any], Rule] | str
    """From its section; or where that is, to be imported when one is made: ``module:Class``."""
    moments: Callable[[Any], float] | None = None
    """From its section: numbers that it keeps of each parameter, for predictions. None: the rule
    is asked, which loads torch."""
    moved_bytes: Callable[[Any], float] | None = None
    """From its section: what its update and the norm before it read and write of each parameter,
    for predictions. None: as much as AdamW's."""
    by_element: bool = False
    """Each element of a parameter is updated from itself, its gradient and its own elements of
    states, which all have the parameter's shape: parts of tensors may be updated in turn."""
    reference: Callable[[Any, list[dict[str, Any]]], Optimizer] | None = None
    """From its section and PyTorch's groups of parameters, each with its ``weight_decay``, an
    optimizer that shares no code with the rule, for ``weft verify``; ``lr`` is set before every
    step. None: there is none."""
