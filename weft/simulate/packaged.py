"""What the package of a chip's vendor says of its costs, with each answer looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from math import inf
from typing import Any

from weft.cluster.cluster import Dtype
from weft.config.errors import ConfigError
from weft.config.names import imported
from weft.cost.operators import Op, Phase
from weft.cost.profile import Profile
from weft.cost.rates import CostFunction


@dataclass(frozen=True, slots=True)
class Packaged:
    """``cost``, whose faults are told as those of its package."""

    key: str
    cost: CostFunction

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        return self._checked("seconds", self.cost.seconds, op, phase, dtype)

    def moving_seconds(self, num_bytes: float) -> float:
        return self._checked("moving_seconds", self.cost.moving_seconds, num_bytes)

    def _checked(self, method: str, ask: Callable[..., float], *about: object) -> float:
        key = f"{self.key}: {method}"
        seconds = _asked(key, ask, *about)
        if not (isinstance(seconds, int | float) and 0 <= seconds < inf):
            words = ", ".join(map(str, about))
            raise ConfigError(key, seconds, "seconds >= 0 of a product or a move", f"Of {words}.")
        return seconds


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
    answers = {
        "seconds": found.seconds(Op("probe", "matmul", 1024, 1024, 1024), "forward", "bf16"),
        "moving_seconds": found.moving_seconds(1e6),
    }
    for method, seconds in answers.items():
        if not seconds > 0:
            raise ConfigError(f"{key}: {method}", seconds, "seconds > 0 of a product or a move")
    return cost if isinstance(cost, Profile) else found


def _asked(key: str, ask: Callable[..., Any], *about: object) -> Any:
    """An answer of the package, whatever goes wrong in it."""
    try:
        return ask(*about)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(key, said, "an answer of the vendor's package, no error") from error
