"""A rule at work on what one rank updates: states, learning rate, the count of updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.config.optim_sections import OptimConfig
from weft.memory.kept import zeros
from weft.memory.tiers import keeps_apart
from weft.optim.groups import Settings, settings_of
from weft.optim.pieces import PieceByPiece
from weft.optim.registry import is_by_element, rule_of
from weft.optim.rule import Dims, Group, Update
from weft.parallel.gradients import Gradients
from weft.parallel.mains import MainParam
from weft.plan.box import Box
from weft.plan.model import ParamSpec

StateSource = Callable[[Tensor, ParamSpec, str, Box], None]
"""Writes values of one box of one state of a parameter, in global indices of the state, into a
tensor of its size."""


class Optimizer:
    """Updates the main parameters of a gradient path. States come to be at the first update."""

    def __init__(self, optim: OptimConfig, gradients: Gradients) -> None:
        self.lr = optim.lr
        """Of the next update."""
        self.is_host = gradients.device.type == "cpu"
        """A scalar of the device can be looked at without waiting."""
        self._optim = optim
        self._rule = rule_of(optim)
        self._gradients = gradients
        if self._rule.takes_wholes:
            gradients.wholes.open(self._rule.takes_whole)
        self._states: dict[MainParam, dict[str, Tensor]] = {}
        self.groups: list[Group] = []
        """What is updated with the same numbers; empty before the first update."""
        self._count = torch.zeros((), dtype=torch.float32, device=gradients.device)
        self._apart: PieceByPiece | None = None
        """Where what is updated is not kept on the device."""

    @torch.no_grad()
    def update(self, factor: Tensor) -> None:
        """One update with gradients times ``factor``, a scalar of the device; none where it is 0.

        Collective where the rule asks for norms. Values still have to be published.
        """
        if not self._rule.skips_on_device and float(factor) == 0.0:
            return
        if not (self.is_host and float(factor) == 1.0):
            self._gradients.scale(factor)
        self._allocate()
        skip = (factor == 0).float()
        self._count += 1
        whole = self._gradients
        now = Update(self.groups, self.lr, self._count, skip, whole.norms, whole.wholes)
        if self._apart is None:
            self._rule.update(now)
        else:
            for part in self._apart.parts_of(now):
                self._rule.update(part)
        self._count -= skip

    @property
    def num_updates(self) -> int:
        """Updates done: the steps whose batch had any weight. Waits for the device."""
        return int(self._count)

    @property
    def rooms(self) -> list[Tensor]:
        """Memory of the device for what is kept apart from it, on its way."""
        return [] if self._apart is None else self._apart.rooms

    def kinds(self, spec: ParamSpec) -> dict[str, tuple[int, ...]]:
        """What is kept for a parameter, by name, with the shape for the whole logical tensor."""
        if not spec.trainable:
            return {}
        return {
            name: tuple(spec.shape[dim] for dim in dims)
            for name, dims in self._rule.state(spec).items()
        }

    def owned(self, main: MainParam) -> dict[str, tuple[Box, Tensor]]:
        """The states that this rank writes to checkpoints for one main parameter, with their boxes
        in global indices; none before the first update."""
        states = self._states.get(main, {}) if main.owned else {}
        return {
            name: (_box(main, dims), states[name])
            for name, dims in self._rule.state(main.spec).items()
            if name in states and _is_first(main, dims)
        }

    def reset(self) -> None:
        """Begin anew: no update was done, and what is kept starts at zero."""
        self._states.clear()
        self.groups.clear()
        self._apart = None
        self._count.zero_()

    def restore(self, num_updates: int, source: StateSource) -> None:
        """Go on as after ``num_updates`` updates, with what ``source`` has for each state."""
        self.reset()
        self._allocate()
        self._count.fill_(num_updates)
        for main, states in self._states.items():
            for name, dims in self._rule.state(main.spec).items():
                source(states[name], main.spec, name, _box(main, dims))

    def _allocate(self) -> None:
        """States at zero, and the groups, where there are none yet."""
        if self._states:
            return
        precision, device = self._gradients.precision, self._gradients.device
        by_settings: dict[tuple[Settings, tuple[str, ...]], list[MainParam]] = {}
        for main in self._gradients.mains:
            role = precision.kept_in(main.tier).state
            self._states[main] = {
                name: zeros(_box(main, dims).size, role, device)
                for name, dims in self._rule.state(main.spec).items()
            }
            key = (settings_of(self._optim, main.spec), tuple(self._states[main]))
            by_settings.setdefault(key, []).append(main)
        self.groups = [
            Group(
                mains,
                settings.lr_scale,
                settings.weight_decay,
                {name: [self._states[main][name] for main in mains] for name in names},
            )
            for (settings, names), mains in by_settings.items()
        ]
        tiers = {precision.kept_in(main.tier).state.tier for main in self._gradients.mains}
        is_kept_apart = any(keeps_apart(tier, device.type) for tier in tiers)
        if is_kept_apart and self._apart is None:
            by_element = is_by_element(self._optim)
            self._apart = PieceByPiece(self._gradients, self.groups, by_element=by_element)


def _box(main: MainParam, dims: Dims) -> Box:
    """The part of a state that belongs to a main parameter."""
    box = main.box
    return Box(tuple(box.offset[dim] for dim in dims), tuple(box.size[dim] for dim in dims))


def _is_first(main: MainParam, dims: Dims) -> bool:
    """Of the main parameters that share one box of a state this one writes it."""
    return all(not offset for dim, offset in enumerate(main.box.offset) if dim not in dims)
