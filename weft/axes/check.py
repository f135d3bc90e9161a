"""What an axis would do to the modules of a layout; what it cannot do is refused by name.

Data alone, so before any process starts. Along an axis that divides its activations a module has
one term of each gradient: where all ranks hold the same activations, what comes back to each is a
part of their gradient (``Replicate`` forward, ``Partial`` backward), and ranks add them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.axes.axis import Axis
from weft.axes.held import placement
from weft.config.errors import ConfigError
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Layout, Partial, Placement, Replicate, Shard


def divided_form(layout: Mapping[str, Layout], where: str, dim: Dim, axis: Axis) -> Form | None:
    """The form in which a rank holds a part of a dimension that a module sums or mixes.

    None where it holds all of it.
    """
    if axis.divides(dim, "inner"):
        return "inner"
    form = _form_in(layout, where, dim)
    return form if axis.divides(dim, form) else None


def _form_in(layout: Mapping[str, Layout], where: str, dim: Dim) -> Form:
    """How activations with a dimension are inside a module: as it, or what it is in, takes them."""
    for name in _and_around(where):
        for edge in layout[name].takes.values() if name in layout else ():
            if any(other.name == dim.name for other in edge.dims):
                return edge.after
    return "stream"


def _and_around(where: str) -> Iterator[str]:
    """A module, the one that it is part of, and so on."""
    while where:
        yield where
        where = where.rpartition(".")[0]
    yield ""


def change_along(
    axis: Axis, edge: Edge, *, term: bool = False
) -> tuple[Placement, Placement] | None:
    """From and to what a tensor changes along an axis; None where it stays.

    ``term``: each rank has a term of it.
    """
    before = Partial() if term else placement(edge.dims, edge.before, axis)
    after = placement(edge.dims, edge.after, axis)
    return None if before == after else (before, after)


def check_layout(layout: Mapping[str, Layout], axis: Axis, inside: Sequence[Axis] = ()) -> None:
    """An axis has a way to compute every module, and computes the same numbers.

    ``inside``: axes further inside, outermost first, that divide the same modules before it.

    Raises:
        ConfigError: the first module for which that is not so.
    """
    for where, entry in layout.items():
        _check_changes(layout, where, entry, axis)
        _check_kind(layout, where, axis, inside)
        _check_counted_once(layout, where, entry, axis)
    _check_stated(layout, axis)


def _check_changes(layout: Mapping[str, Layout], where: str, entry: Layout, axis: Axis) -> None:
    term = entry.sums is not None and bool(divided_form(layout, where, entry.sums, axis))
    found = {f"takes[{n}]": change_along(axis, edge) for n, edge in entry.takes.items()}
    if entry.gives is not None:
        found["gives"] = change_along(axis, entry.gives, term=term)
    for name, change in found.items():
        if change is not None and (type(change[0]), type(change[1])) not in axis.changes:
            words = f"{change[0]} -> {change[1]} along {axis.name}"
            known = [f"{old.__name__} -> {new.__name__}" for old, new in axis.changes]
            expected = (
                f"one of {', '.join(known)}" if known else f"no change, for {axis.name} makes none"
            )
            raise ConfigError(f"layout.{where}.{name}", words, expected)


def _check_kind(
    layout: Mapping[str, Layout], where: str, axis: Axis, inside: Sequence[Axis]
) -> None:
    """Every axis finds the module as those further inside left it."""
    kind = layout[where].kind
    for other in reversed(inside):
        for _ in _divided(layout, where, other):
            kind = other.kinds.get(kind, kind)
    for dim, does in _divided(layout, where, axis):
        if kind not in axis.kinds:
            known = ", ".join(axis.kinds) or f"none has one along {axis.name}"
            hint = f"It {does} {dim.name}, of which each rank holds a part."
            if does == "mixes":
                hint = " ".join(filter(None, (hint, dim.words, axis.otherwise)))
            expected = f"a kind with a split form: {known}"
            raise ConfigError(f"layout.{where}", kind, expected, hint)
        kind = axis.kinds[kind]


def _divided(layout: Mapping[str, Layout], where: str, axis: Axis) -> Iterator[tuple[Dim, str]]:
    """What a module does with dimensions of which a rank holds a part."""
    entry = layout[where]
    for dim, does in ((entry.mixes, "mixes"), (entry.sums, "adds up over")):
        if dim is not None and divided_form(layout, where, dim, axis) is not None:
            yield dim, does


def _check_counted_once(
    layout: Mapping[str, Layout], where: str, entry: Layout, axis: Axis
) -> None:
    """What all ranks get whole, some module after it divides again.

    Else each rank would have the whole gradient, and adding up would count it once a rank.
    """
    for number, edge in entry.takes.items():
        match change_along(axis, edge):
            case (Shard() as cut, Replicate() as whole):
                words = f"{cut} -> {whole} along {axis.name}"
            case _:
                continue
        inside = (name for name in layout if _is_in(name, where))
        if not any(_divides_again(layout, name, axis) for name in inside):
            expected = f"that only of a module with a part that {axis.name} divides"
            hint = (
                "Every rank would compute the same whole, and its gradients would be counted once "
                "a rank. Take it as it travels (no `takes`), give the parameters a dimension that "
                f"{axis.name} divides, or give back with `gives` what was cut."
            )
            raise ConfigError(f"layout.{where}.takes[{number}]", words, expected, hint)


def _is_in(name: str, where: str) -> bool:
    """A module is another one or a part of it."""
    return not where or f"{name}.".startswith(f"{where}.")


def _divides_again(layout: Mapping[str, Layout], where: str, axis: Axis) -> bool:
    """A module computes its part of what all ranks have, or hands on its part."""
    entry = layout[where]
    if any(axis.divides(dim, "param") for dims in entry.params.values() for dim in dims):
        return True
    if any(_divided(layout, where, axis)):
        return True
    change = None if entry.gives is None else change_along(axis, entry.gives)
    return change is not None and isinstance(change[1], Shard)


def _check_stated(layout: Mapping[str, Layout], axis: Axis) -> None:
    """What ranks hold parts of while modules compute must be looked at by some module.

    Else the axis would be new to this layout, and numbers would be wrong in silence.
    """
    entries = layout.values()
    stated = {dim.name for entry in entries for dim in (entry.sums, entry.mixes) if dim}
    for where, entry in layout.items():
        for dim in entry.inner_dims():
            if dim.name not in (SAMPLES.name, *stated) and axis.divides(dim, "inner"):
                expected = "a dimension that some module of the layout sums or mixes"
                hint = f"{axis.name} gives each rank a part of it to compute with."
                raise ConfigError(f"layout.{where}", dim.name, expected, hint)
