"""What the package of a chip's vendor says of its costs, with each answer looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from math import nan
from numbers import Real
from typing import Any

from weft.cluster.cluster import Dtype
from weft.config.errors import ConfigError
from weft.config.names import imported
from weft.cost.operators import Op, Phase
from weft.cost.profile import Profile
from weft.cost.rates import CostFunction

LEAST_S, MOST_S = 1e-12, 1e6
"""Of what takes any time at all, for others divide by it; and of what ends."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """``cost``, whose faults are told as those of its package."""

    key: str
    cost: CostFunction

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        may_be_0 = phase != "forward" or not op.m  # no gradient of that, or no product
        return self._checked("seconds", self.cost.seconds, op, phase, dtype, may_be_0=may_be_0)

    def moving_seconds(self, num_bytes: float) -> float:
        may_be_0 = num_bytes == 0
        return self._checked(
            "moving_seconds", self.cost.moving_seconds, num_bytes, may_be_0=may_be_0
        )

    def _checked(
        self, method: str, ask: Callable[..., float], *about: object, may_be_0: bool
    ) -> float:
        key = f"{self.key}: {method}"
        seconds = _asked(key, ask, *about)
        number = float(seconds) if isinstance(seconds, Real) else nan
        if not (LEAST_S <= number <= MOST_S or (may_be_0 and number == 0)):
            words = ", ".join(map(str, about))
            expected = f"seconds of a product or a move, from {LEAST_S:g} to {MOST_S:g}"
            raise ConfigError(key, seconds, expected, f"Of {words}.")
        return number


def cost_of_package(key: str, entry: EntryPoint) -> Profile | Packaged:
    """What an entry point makes; it is imported now.

    Raises:
        ConfigError: it cannot be imported or made, or does not cost operations. ``key`` says what.
    """
    cost: CostFunction = _asked(key, imported(key, entry))
    missing = [each for each in ("seconds", "moving_seconds") if each not in dir(cost)]
    if missing or not isinstance(cost, Hashable):
        expected = "what has the methods of weft.cost.rates.CostFunction, and is hashable"
        raise ConfigError(key, type(cost).__name__, expected)
    found = Packaged(key, cost)
    found.seconds(Op("probe", "matmul", 1024, 1024, 1024), "forward", "bf16")
    found.moving_seconds(1e6)
    return cost if isinstance(cost, Profile) else found


def _asked(key: str, ask: Callable[..., Any], *about: object) -> Any:
    """An answer of the package, whatever goes wrong in it."""
    try:
        return ask(*about)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(key, said, "an answer of the vendor's package, no error") from error
