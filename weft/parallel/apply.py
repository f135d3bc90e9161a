"""Apply a family's layout to one stage's modules: the one applier, for every axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from weft.axes.axis import Axis
from weft.axes.check import change_along, check_layout, divided_form
from weft.axes.held import Ranges, held, parts_along, placement
from weft.axes.registry import AXES
from weft.comm.comm import Comm
from weft.comm.members import Member
from weft.config.errors import ConfigError
from weft.parallel.runtime import AxisGroup, Change, Lying, Pieces, Runtime, Sum, squared
from weft.plan.layout import Dim, Edge, Form, Layout, Placement, Replicate, Shard
from weft.plan.plan import Plan, RankPlan

RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {
        name: import_module(f"weft.parallel.{name}.runtime").RUNTIME
        for name, axis in AXES.items()
        if axis.changes or axis.kinds
    }
)
"""The axes that divide what modules compute with, each with its runtime from its folder."""


def axis_groups(plan: Plan, members: Sequence[Member]) -> list[tuple[int, ...]]:
    """The groups that modules talk in, of every stage, in the one order all ranks agree on.

    ``members``: what each rank runs on.
    """
    groups = set[tuple[int, ...]]()
    for (_, _, stage), name in product(plan.stages(), RUNTIMES):
        for ranks in stage.mesh.groups(name):
            nodes = [members[rank].node for rank in ranks]
            groups.update([ranks], *squared(ranks, AXES[name].near_ways(stage, nodes)))
    return sorted(ranks for ranks in groups if len(ranks) > 1)


def check_entries(layout: Mapping[str, Layout], modules: Mapping[str, nn.Module]) -> None:
    """Every entry is about a module of the whole model, and every module has one.

    Raises:
        ConfigError: the first that is not, or has none.
    """
    for name, entry in layout.items():
        if name not in modules:
            raise ConfigError("layout", name, "the name of a module of the model")
        kinds = [kind.__name__ for kind in type(modules[name]).__mro__]
        if entry.kind and entry.kind not in kinds:
            raise ConfigError(f"layout.{name}.kind", entry.kind, f"the module's class, {kinds[0]}")
    for name, module in modules.items():
        if name not in layout and type(module) not in _ONLY_HOLD:
            kind = f"{type(module).__name__} {name}".strip()
            hint = "An axis could cut what it adds up or mixes. Layout() says that it does neither."
            raise ConfigError("layout", kind, "an entry for every module", hint)


_ONLY_HOLD = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
"""Kinds of modules that only hold others, and compute nothing by themselves."""


def apply_layout(
    model: nn.Module,
    layout: Mapping[str, Layout],
    rank_plan: RankPlan,
    comm: Comm,
    *,
    sizes: Mapping[str, int],
    axes: Mapping[str, Axis] = AXES,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
) -> None:
    """Let activations change where the layout says so, and modules compute with what they hold.

    Parameters keep their identity. ``sizes``: of the dimensions that the job chooses, by name.
    In how many pieces modules hand a divided dimension round, where they and the axis can, the
    first stage of ``rank_plan`` says.

    Raises:
        ConfigError: an axis has no way to make a change, or a module to compute with a part.
    """
    used = [axis for name, axis in axes.items() if rank_plan.stage_plan.mesh.size(name) > 1]
    for number, axis in enumerate(used):
        check_layout(layout, axis, used[number + 1 :])
    modules = dict(model.named_modules())
    mesh = rank_plan.stage_plan.mesh
    found = [
        _Along(
            axis,
            _group(axis, rank_plan, comm),
            rank_plan,
            layout,
            runtimes,
            axes,
            sizes,
        )
        for name, axis in axes.items()
        if mesh.size(name) > 1
    ]
    here = {where: entry for where, entry in layout.items() if where in modules}
    inside_first = sorted(here, key=lambda where: len(where and where.split(".")), reverse=True)
    for where in inside_first:  # a form may take a place, and what is in it is elsewhere then
        for along in reversed(found):  # and stand around that of an axis further inside
            modules[where] = along.split(model, where, modules[where], here[where])
    for gathers in (True, False):  # what is cut by several axes is put together from the inside
        for along in reversed(found) if gathers else found:
            for where, entry in here.items():
                along.change(where, modules[where], entry, gathers=gathers)


def _group(axis: Axis, rank_plan: RankPlan, comm: Comm) -> AxisGroup:
    stage, ranks = rank_plan.stage_plan, rank_plan.group(axis.name)
    near = axis.near_ways(stage, [comm.members[rank].node for rank in ranks])
    return AxisGroup(
        comm,
        ranks,
        axis.pieces(stage),
        near,
        stage.scores,
        stage.expert_cast,
        stage.expert_cast_between,
    )


@dataclass(frozen=True, slots=True)
class _Along:
    """The changes along one axis around one rank."""

    axis: Axis
    group: AxisGroup
    rank_plan: RankPlan
    layout: Mapping[str, Layout]
    runtimes: Mapping[str, Runtime]
    axes: Mapping[str, Axis]
    sizes: Mapping[str, int]

    def split(self, model: nn.Module, where: str, module: nn.Module, entry: Layout) -> nn.Module:
        """The module that stands in the model's place ``where`` from now on."""
        mixing = replace(entry, gives=None)
        for dim, said in ((entry.mixes, mixing), (entry.sums, entry)):
            form = None if dim is None else divided_form(self.layout, where, dim, self.axis)
            if dim is not None and form is not None:
                split = self._split(module, where, said, dim, form)
                if not where:
                    kind, expected = type(module).__name__, "a module inside the model"
                    raise ConfigError("layout.", kind, expected)
                model.set_submodule(where, split)
                module = split
        pieces = self._pieces(entry)
        if pieces is not None and entry.made_by:
            module = pieces.made_by(module, entry.made_by)
            model.set_submodule(where, module)
        return module

    def change(self, where: str, module: nn.Module, entry: Layout, *, gathers: bool) -> None:
        """Let what it takes and gives change where it has to: what was cut, or all else."""
        sums = entry.sums
        completes = sums and divided_form(self.layout, where, sums, self.axis)
        if entry.gives is not None and not completes:
            for change in self._change(entry.gives, where, gathers=gathers):
                module.register_forward_hook(_after(change))
        in_pieces = self._takes_pieces(module, entry, gathers=gathers)
        whole = {place: edge for place, edge in entry.takes.items() if place or not in_pieces}
        for place, edge in whole.items():
            for change in self._change(edge, where, gathers=gathers):
                module.register_forward_pre_hook(_before(change, place))

    def _takes_pieces(self, module: nn.Module, entry: Layout, *, gathers: bool) -> bool:
        """What it takes first comes in pieces."""
        pieces = self._pieces(entry)
        if pieces is not None and entry.read_by and gathers:
            pieces.read_by(module, entry.read_by)
        return pieces is not None

    def _split(
        self, module: nn.Module, where: str, entry: Layout, dim: Dim, form: Form
    ) -> nn.Module:
        forms = self._runtime(where).split_forms
        make = next((forms[kind] for kind in type(module).__mro__ if kind in forms), None)
        assert make is not None, f"{where}: {self.axis.name} has no form for {type(module)}"
        complete = pieces = None
        if entry.gives is not None:
            (complete,) = self._change(entry.gives, where, term=True, gathers=False)
            pieces = self._in_pieces(entry.gives.dims, entry.gives.after)
        (held,) = self._held((dim,), form)
        parts = self._parts(dim, form)
        return make(module, Sum(self.group, held, parts, complete, pieces))

    def _pieces(self, entry: Layout) -> Pieces | None:
        """Of what a module takes first, where parts are put together and it need not be at once."""
        edge = entry.takes.get(0) if entry.made_by or entry.read_by else None
        change = None if edge is None else change_along(self.axis, edge)
        if edge is None or change is None or not isinstance(change[1], Replicate):
            return None
        return self._in_pieces(edge.dims, edge.before)

    def _in_pieces(self, dims: tuple[Dim, ...], form: Form) -> Pieces | None:
        """Of the dimension that the axis divides, if it is asked to and can."""
        make, lying = self._runtime("").pieces, placement(dims, form, self.axis)
        if self.group.pieces == 1 or make is None or not isinstance(lying, Shard):
            return None
        return make(self.group, self._lying(dims, form, lying))

    def _change(
        self, edge: Edge, where: str, *, term: bool = False, gathers: bool
    ) -> Iterator[Change]:
        """What the edge asks of this axis; nothing where the tensor lies alike before and after:
        parts may differ by what other axes divide."""
        found = change_along(self.axis, edge, term=term)
        if found is None or isinstance(found[0], Shard) != gathers:
            return
        changes, kinds = self._runtime(where).changes, (type(found[0]), type(found[1]))
        assert kinds in changes, f"{where}: {self.axis.name} does not make {kinds}"
        before = self._lying(edge.dims, edge.before, found[0])
        after = self._lying(edge.dims, edge.after, found[1])
        yield changes[kinds](self.group, before, after)

    def _lying(self, dims: tuple[Dim, ...], form: Form, found: Placement) -> Lying:
        if not isinstance(found, Shard):
            return Lying(found)
        return Lying(found, self._parts(dims[found.dim], form))

    def _parts(self, dim: Dim, form: Form) -> tuple[Ranges, ...]:
        """What each rank along the axis holds of a dimension."""
        mesh = self.rank_plan.stage_plan.mesh
        place = mesh.coordinate(self.rank_plan.rank)
        return parts_along(self._sized(dim), form, mesh, place, self.axis.name, self.axes)

    def _held(self, dims: tuple[Dim, ...], form: Form) -> tuple[Ranges, ...]:
        """What this rank holds; axes further inside divide what is left of that."""
        mesh, names = self.rank_plan.stage_plan.mesh, list(self.axes)
        outer = {name: self.axes[name] for name in names[: names.index(self.axis.name) + 1]}
        sized = [self._sized(dim) for dim in dims]
        return held(sized, form, mesh, mesh.coordinate(self.rank_plan.rank), outer)

    def _sized(self, dim: Dim) -> Dim:
        return replace(dim, size=self.sizes.get(dim.name, dim.size))

    def _runtime(self, where: str) -> Runtime:
        assert self.axis.name in self.runtimes, f"{where}: {self.axis.name} has no runtime"
        return self.runtimes[self.axis.name]


def _before(change: Change, place: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:place], change(args[place]), *args[place + 1 :])

    return hook


def _after(change: Change) -> Any:
    def hook(module: nn.Module, _args: tuple[Any, ...], result: Any) -> Tensor:
        assert isinstance(result, Tensor), f"{type(module)} gives several, and one is changed"
        return change(result)

    return hook
