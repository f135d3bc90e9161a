"""Parameters that arrive just in time: gathered before a unit computes, freed after it (ZeRO).

At levels 1 and 2 a unit only waits for what the last update sent; at level 3 it gathers before its
forward and before its backward, the next unit's while it computes, and frees all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from weft.memory.residents import Residents
from weft.nn.stage import (
    Begun,
    Call,
    Objective,
    PartObjective,
    Stage,
    Terms,
    Tree,
    Unit,
    tensors_in,
)
from weft.parallel.gradients import Gradients
from weft.parallel.mains import FlatParams
from weft.parallel.params import LocalParam
from weft.plan.model import UnitName
from weft.schedules.action import Kind


@dataclass(slots=True, eq=False)
class UnitParams:
    """The parameters of one unit of a stage, and who is next to it."""

    flats: Sequence[FlatParams]
    all_units: list[UnitParams] = field(repr=False)
    """Those of this rank."""
    experts: Sequence[FlatParams] = ()
    """What besides is kept elsewhere, and stays for a while where there is room."""
    residents: Residents | None = None
    """Who counts these, of all units."""
    after: UnitParams | None = None
    """The next in forward order, in the same stage."""
    before: UnitParams | None = None

    def enter(self, coming: UnitParams | None) -> None:
        """What follows computes with these parameters, and then with those of ``coming``."""
        soon = () if coming is None else coming.flats
        for other in self.all_units:
            for flat in other.flats:
                if flat not in self.flats and flat not in soon:
                    flat.free()
        for flat in self.flats:
            flat.wait()
        for flat in soon:
            flat.start()
        if self.residents is not None:
            self.residents.use(self.experts, () if coming is None else coming.experts)


class Attendance:
    """Takes part in what a stage gathers and reduces when this rank has no samples of a microbatch,
    in the order of those that have some.

    Args:
        params: Of each unit what is gathered.
        completed: Of each unit the parameters whose gradients its backward completes.
        skip: Called with those in place of a backward.
    """

    def __init__(
        self,
        units: Mapping[UnitName, Unit],
        params: Mapping[UnitName, UnitParams],
        completed: Mapping[UnitName, Sequence[nn.Parameter]],
        skip: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self._units = units
        self._params = params
        self._forward = list(params.values())
        self._completed = completed
        self._skip = skip

    def attend(self, kind: Kind) -> None:
        """Take part in an action."""
        if kind == "F":
            for params in self._forward:
                params.enter(params.after)
            return
        for name, unit in reversed(list(self._units.items())):
            params = self._params[name]
            if kind != "W" and unit.backward_reads:
                params.enter(params.before)
            is_deferred = unit.may_defer and unit.block is not None
            if kind == "B" or (kind == "W") == is_deferred:
                self._skip(self._completed[name])

    def announced(self, objective: Objective) -> Objective:
        """An objective whose backward gathers the last unit: it computes with its parameters."""

        def call(output: Tree, batch: Tree) -> Terms:
            return self._announced(objective(output, batch))

        return call

    def announced_part(self, objective: PartObjective) -> PartObjective:
        """Likewise of a part of one."""

        def call(output: Tree, batch: Tree) -> Begun:
            found, rest = objective(output, batch)
            return Begun(found, lambda parts: self._announced(rest(parts)))

        return call

    def _announced(self, terms: Terms) -> Terms:
        _announce([term.total for term in terms.values()], (), self._forward[-1])
        return terms


def gather_in_time(
    stage: Stage,
    gradients: Gradients,
    held: Sequence[LocalParam],
    all_units: list[UnitParams],
    residents: Residents | None = None,
) -> Attendance:
    """Let every unit of a stage wait for its parameters. Applied last, outside compiled code.

    ``residents``: of what is kept in a tier as a whole, where anything is.
    """
    params, flats = {}, gradients.sharded
    for name in stage.units:
        used = [f for f in flats if any(name in e.held.spec.units for e in f.bucket.entries)]
        usual = [flat for flat in used if flat.bucket.tier == "device"]
        experts = [flat for flat in used if flat.bucket.tier != "device"]
        params[name] = UnitParams(usual, all_units, experts, residents)
    for (name, first), (_, second) in pairwise(params.items()):
        first.after = second
        if stage.units[name].backward_reads:
            second.before = first
    all_units += params.values()
    for name, unit in stage.units.items():
        unit.wrap(partial(_gathered, params[name], unit.backward_reads))
    return Attendance(stage.units, params, _completed(stage, held), gradients.skip)


def _completed(stage: Stage, held: Sequence[LocalParam]) -> dict[UnitName, list[nn.Parameter]]:
    """By unit, in backward order, what no unit before it uses as well."""
    found: dict[UnitName, list[nn.Parameter]] = {name: [] for name in stage.units}
    for local in reversed(held):
        first = next((name for name in stage.units if name in local.spec.units), None)
        if first is not None:
            found[first].append(local.param)
    return found


def _gathered(params: UnitParams, backward_reads: bool, call: Call) -> Call:
    """A forward whose parameters are there while it computes, and in its backward."""

    def forward(*args: Any) -> Any:
        params.enter(params.after)
        result = call(*args)
        if backward_reads:
            _announce(result, args, params)
        return result

    return forward


def _announce(result: Any, given: Any, params: UnitParams) -> None:
    """The backward of what made ``result`` begins by gathering; what was ``given`` is not made.

    Its gradient is there then, so whatever came after this unit is done.
    """
    known = {id(tensor) for tensor in tensors_in(given)}
    made = [x for x in tensors_in(result) if x.requires_grad and id(x) not in known]
    if len(made) == 1:
        made[0].register_hook(lambda _: params.enter(params.before))  # type: ignore[no-untyped-call]
    elif made:
        register_multi_grad_hook(made, lambda _: params.enter(params.before), mode="any")
