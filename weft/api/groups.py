"""What an optimizer's groups are of: what this process updates, in place of model parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.config.errors import ConfigError
from weft.parallel.mains import MainParam


class Groups:
    """The groups of a script's optimizer, each with its settings.

    What is updated is the parameter itself, a master copy where the model has another precision,
    or the pieces of either in this process's segments, none or several (ZeRO).

    Args:
        optimizer: Over parameters.
        mains: What this process updates.
        params: All that the gradient path knows, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mains: Sequence[MainParam],
        params: Iterable[tuple[str, Tensor]],
    ) -> None:
        self._optimizer = optimizer
        self._names = {id(param): name for name, param in params}
        self._values: dict[int, list[Tensor]] = {number: [] for number in self._names}
        for main in mains:
            self._values[id(main.param)].append(main.value)
        self._updated = {id(main.value) for main in mains}
        self._taken: set[int] = set()
        """Parameters whose place others have in a group."""
        self.take_in()

    def take_in(self) -> None:
        """Groups that came since the last time are of parameters, too.

        Raises:
            ConfigError: one is updated already, or is none that was trained when its model was
                woven.
        """
        for group in self._optimizer.param_groups:
            if not self._updated.issuperset(map(id, group["params"])):
                self._point(group)

    def _point(self, group: dict[str, Any]) -> None:
        found = [self._values_for(param) for param in group["params"]]
        self._taken.update(map(id, group["params"]))
        if "param_names" in group:
            pairs = zip(group["param_names"], found, strict=True)
            group["param_names"] = [name for name, values in pairs for _ in values]
        group["params"] = [value for values in found for value in values]

    def _values_for(self, param: Tensor) -> list[Tensor]:
        """What is updated for it here; itself where nothing ever comes to it."""
        number = id(param)
        if number in self._updated:
            return [param]
        if number in self._taken and number in self._names:
            expected = "parameters that it does not update yet"
            raise ConfigError("optimizer", self._names[number], expected)
        if number not in self._names and param.requires_grad:
            value = f"a tensor of shape {list(param.shape)}"
            expected = "parameters that were trained when their model was woven"
            hint = "Freeze parameters after weaving, not before."
            raise ConfigError("optimizer", value, expected, hint)
        return self._values.get(number, [param])
