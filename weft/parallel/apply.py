"""Apply a family's layout to one stage's modules: the one applier, for every axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from weft.axes.axis import Axis
from weft.axes.held import Ranges, held, placement
from weft.axes.registry import AXES
from weft.axes.tp.axis import TensorParallel
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.parallel.runtime import AxisGroup, Change, Lying, Runtime, Sum
from weft.parallel.tensor.changes import CHANGES
from weft.parallel.tensor.modules import SPLIT_FORMS
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Layout, Shard
from weft.plan.plan import Plan, Seat

RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {TensorParallel.name: Runtime(CHANGES, SPLIT_FORMS)}
)
"""The axes that divide modules, each with its runtime."""


def axis_groups(plan: Plan) -> list[tuple[int, ...]]:
    """The groups that modules talk in, of every stage, in the one order all ranks agree on."""
    meshes = [stage.mesh for _, _, stage in plan.stages()]
    return sorted({ranks for mesh in meshes for axis in RUNTIMES for ranks in mesh.groups(axis)})


def refuse_strangers(layout: Mapping[str, Layout], modules: Collection[str]) -> None:
    """Every entry is about a module of the whole model; ``modules`` are their names.

    Raises:
        ConfigError: the first that is not.
    """
    for name in layout:
        if name not in modules:
            raise ConfigError("layout", name, "the name of a module of the model")


def apply_layout(
    model: nn.Module,
    layout: Mapping[str, Layout],
    seat: Seat,
    comm: Comm,
    *,
    sizes: Mapping[str, int],
    axes: Mapping[str, Axis] = AXES,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
) -> None:
    """Let activations change where the layout says so, and modules compute with what they hold.

    Parameters keep their identity. ``sizes``: of the dimensions that the job chooses, by name.

    Raises:
        ConfigError: an axis has no way to make a change, or a module to compute with a part.
    """
    modules = dict(model.named_modules())
    mesh = seat.stage_plan.mesh
    found = [
        _Along(axis, AxisGroup(comm, seat.group(name)), seat, runtimes, axes, sizes)
        for name, axis in axes.items()
        if mesh.size(name) > 1
    ]
    here = {where: entry for where, entry in layout.items() if where in modules}
    inside_first = sorted(here, key=lambda where: where.count("."), reverse=True)
    for along in reversed(found):  # a split form may stand around that of an axis further inside
        for where in inside_first:
            modules[where] = along.split(model, where, modules[where], here[where])
    for gathers in (True, False):  # what is cut by several axes is put together from the inside
        for along in reversed(found) if gathers else found:
            for where, entry in here.items():
                along.change(where, modules[where], entry, gathers=gathers)
    for along in found:
        along.refuse_unstated(layout)


@dataclass(frozen=True, slots=True)
class _Along:
    """The changes along one axis around one rank."""

    axis: Axis
    group: AxisGroup
    seat: Seat
    runtimes: Mapping[str, Runtime]
    axes: Mapping[str, Axis]
    sizes: Mapping[str, int]

    def refuse_unstated(self, layout: Mapping[str, Layout]) -> None:
        """What ranks hold parts of while modules compute must be looked at by some module.

        Else the axis would be new to this layout, and numbers would be wrong in silence.
        """
        entries = layout.values()
        stated = {dim.name for entry in entries for dim in (entry.sums, entry.mixes) if dim}
        for where, entry in layout.items():
            for dim in entry.inner_dims():
                if dim.name not in (SAMPLES.name, *stated) and self.axis.divides(dim, "inner"):
                    expected = "a dimension that some module of the layout sums or mixes"
                    hint = f"{self.axis.name} gives each rank a part of it to compute with."
                    raise ConfigError(f"layout.{where}", dim.name, expected, hint)

    def split(self, model: nn.Module, where: str, module: nn.Module, entry: Layout) -> nn.Module:
        """The module that stands in the model's place ``where`` from now on."""
        mixing = replace(entry, gives=None)
        for dim, does, said in (
            (entry.mixes, "mixes", mixing),
            (entry.sums, "adds up over", entry),
        ):
            if dim is not None and self.axis.divides(dim, "inner"):
                split = self._split(module, where, said, dim, does=does)
                if dict(model.named_modules()).get(where) is not module:
                    expected = "a place that no form of another axis has taken"
                    raise ConfigError(f"layout.{where}", type(module).__name__, expected)
                model.set_submodule(where, split)
                module = split
        return module

    def change(self, where: str, module: nn.Module, entry: Layout, *, gathers: bool) -> None:
        """Let what it takes and gives change where it has to: what was cut, or all else."""
        completes = entry.sums is not None and self.axis.divides(entry.sums, "inner")
        if entry.gives is not None and not completes:
            for change in self._change(entry.gives, f"{where}.gives", gathers=gathers):
                module.register_forward_hook(_after(change))
        for place, edge in entry.takes.items():
            for change in self._change(edge, f"{where}.takes[{place}]", gathers=gathers):
                module.register_forward_pre_hook(_before(change, place))

    def _split(
        self, module: nn.Module, where: str, entry: Layout, sums: Dim, *, does: str
    ) -> nn.Module:
        forms = self._runtime(where).split_forms
        form = next((forms[kind] for kind in type(module).__mro__ if kind in forms), None)
        if form is None:
            known = ", ".join(kind.__name__ for kind in forms)
            hint = f"It {does} {sums.name}, of which each rank holds a part."
            expected = f"a kind with a split form: {known}"
            raise ConfigError(f"layout.{where}", type(module).__name__, expected, hint)
        complete = None
        if entry.gives is not None:
            (complete,) = self._change(entry.gives, f"{where}.gives", sums, gathers=False)
        first = self._held((sums,), "inner", self.group.position)[0][0].start
        return form(module, Sum(self.group, first, complete))

    def _change(
        self, edge: Edge, where: str, sums: Dim | None = None, *, gathers: bool
    ) -> Iterator[Change]:
        """What the edge asks of this axis; nothing where the tensor lies alike before and after."""
        before = self._lying(edge.dims, edge.before, sums)
        after = self._lying(edge.dims, edge.after)
        if before.placement == after.placement:  # parts may differ by what other axes divide
            return
        if isinstance(before.placement, Shard) != gathers:
            return
        kinds = (type(before.placement), type(after.placement))
        changes = self._runtime(where).changes
        if kinds not in changes:
            words = f"{before.placement} -> {after.placement} along {self.axis.name}"
            known = [f"{old.__name__} -> {new.__name__}" for old, new in changes]
            raise ConfigError(f"layout.{where}", words, f"one of {', '.join(known)}")
        yield changes[kinds](self.group, before, after)

    def _lying(self, dims: tuple[Dim, ...], form: Form, sums: Dim | None = None) -> Lying:
        found = placement(dims, form, self.axis, sums)
        if not isinstance(found, Shard):
            return Lying(found)
        every = [self._held(dims, form, n)[found.dim] for n in range(self.group.size)]
        return Lying(found, tuple(sum(map(len, ranges)) for ranges in every))

    def _held(self, dims: tuple[Dim, ...], form: Form, position: int) -> tuple[Ranges, ...]:
        """What the rank at a position of the axis holds, beside this one on all other axes."""
        sized = [replace(dim, size=self.sizes.get(dim.name, dim.size)) for dim in dims]
        mesh = self.seat.stage_plan.mesh
        place = {**mesh.coordinate(self.seat.rank), self.axis.name: position}
        names = list(self.axes)
        outer = names[: names.index(self.axis.name) + 1]  # those further inside divide what is left
        return held(sized, form, mesh, place, {name: self.axes[name] for name in outer})

    def _runtime(self, where: str) -> Runtime:
        if self.axis.name not in self.runtimes:
            known = " or ".join(self.runtimes)
            raise ConfigError(f"layout.{where}", self.axis.name, f"an axis that runs: {known}")
        return self.runtimes[self.axis.name]


def _before(change: Change, place: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:place], change(args[place]), *args[place + 1 :])

    return hook


def _after(change: Change) -> Any:
    return lambda _module, _args, result: change(result)
