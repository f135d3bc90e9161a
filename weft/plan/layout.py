"""What the dimensions of a model's tensors are, as data beside each family. No torch.

A family never says which axis of a mesh divides a dimension: it names the dimension, what of it
must stay together, and the form that activations have where they enter and leave a module. The
axes (``weft.axes``) say what they divide; boxes and collectives follow by arithmetic. The same
dimensions say what crosses the border between two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Form = Literal["param", "stream", "inner", "batch"]
"""How a tensor occurs: as a parameter; as activations travel between modules and over stage
borders; as a module computes with them; or as the batch's tensors come, of whole samples."""


At = int | tuple[int, ...]
"""A place, or several that have copies of the same."""


def places_at(at: At) -> tuple[int, ...]:
    """All of them."""
    return at if isinstance(at, tuple) else (at,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A logical dimension: what the elements along one dimension of a tensor are.

    Elements lie in equal consecutive units that are never cut, units in equal groups that stay
    together as long as there are no more parts than groups.
    """

    name: str
    size: int
    """Elements; 0 where each microbatch has its own number."""
    groups: int | None = None
    """None: every element is a group of its own."""
    units: int = 1
    """Of each group."""
    shared: bool = False
    """With more parts than groups, several parts hold the same group."""
    width: bool = False
    """Features that modules can make, use and sum in parts, such as heads or hidden channels."""
    words: str = ""
    """What limits the ways to divide it, for error messages."""
    places: tuple[At, ...] = ()
    """Of each element, at which place it is along the axis that gives out elements one by one, or
    at which places; empty: consecutive ones, as evenly as they go."""

    @property
    def num_groups(self) -> int:
        return self.size if self.groups is None else self.groups


def of_rows(dim: Dim, name: str | None, rows: tuple[int, int] | None) -> Dim:
    """As a stage has it: of the dimension of this name so many rows, if it has not all."""
    if rows is None or dim.name != name:
        return dim
    size = rows[1] - rows[0]
    return replace(dim, size=size, words=f"head has {size} of its rows here")


EXPERTS = "experts"
"""Name of the dimension whose elements a plan may give out one by one."""


def placed(layout: Mapping[str, Layout], places: Mapping[int, tuple[At, ...]]) -> dict[str, Layout]:
    """The layout of a model of whose layers, by number, experts are at such places."""

    def there(dim: Dim | None, layer: int) -> Dim | None:
        is_one = dim is not None and dim.name == EXPERTS
        return replace(dim, places=places[layer]) if dim is not None and is_one else dim

    found = dict(layout)
    for name, entry in layout.items():
        _, *rest = name.split(".")
        layer = int(rest[0]) if name.startswith("layers.") else -1
        if layer not in places:
            continue
        params = {
            own: tuple(there(dim, layer) or dim for dim in dims)
            for own, dims in entry.params.items()
        }
        mixes = there(entry.mixes, layer)
        found[name] = replace(entry, params=params, mixes=mixes)
    return found


SAMPLES = Dim(name="samples", size=0)
"""The first dimension of every activation."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor where it enters or leaves a module, and how its form changes there."""

    dims: tuple[Dim, ...]
    before: Form
    after: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One module: its parameters, and its edges where an activation's form changes.

    Every module of a family has one. An empty one says that the module's own code treats all
    elements that it is given alike, one by one: it adds up and mixes none that an axis may cut.
    """

    kind: str = ""
    """Name of its class, where it sums or mixes: axes know forms of modules by kind."""
    params: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    """Dimensions of its own parameters."""
    settled: tuple[str, ...] = ()
    """Those of its parameters that what forwards count changes, not updates."""
    sums: Dim | None = None
    """The dimension over which it adds up. A rank that holds a part of it makes a term."""
    mixes: Dim | None = None
    """The dimension whose elements it lets see one another, or adds up, without parameters of it. A
    rank that holds a part needs another form of the module."""
    takes: Mapping[int, Edge] = field(default_factory=dict)
    """By the place of an argument of ``forward``."""
    gives: Edge | None = None
    read_by: tuple[str, ...] = ()
    """Modules inside it by name, each a product, that alone read what it takes first: it need not
    have come as a whole before they begin."""
    made_by: str = ""
    """The module inside it whose sum is what it gives, where all before that treats the elements of
    what it takes, one argument alone, one by one: it may compute with some after others."""

    def inner_dims(self) -> set[Dim]:
        """Dimensions of the activations that it computes with, as far as its edges tell."""
        edges = [*self.takes.values(), *([] if self.gives is None else [self.gives])]
        inner = [edge for edge in edges if "inner" in (edge.before, edge.after)]
        return {dim for edge in inner for dim in edge.dims}


def dims_of(layout: Iterable[Layout]) -> set[Dim]:
    """Every dimension that some modules name."""
    found: set[Dim] = set()
    for entry in layout:
        edges = [*entry.takes.values(), *([] if entry.gives is None else [entry.gives])]
        for dims in (*entry.params.values(), *(edge.dims for edge in edges)):
            found.update(dims)
    return found


DtypeRole = Literal["compute", "wide", "int64", "int32", "bool"]
"""``compute``: floating point in the precision of the stage, and with a gradient. Others go
forward only; ``wide``: as that adds up."""


@dataclass(frozen=True, slots=True)
class BorderTensor:
    """One tensor that crosses."""

    dims: tuple[Dim, ...]
    """Those after the samples."""
    role: DtypeRole = "compute"
    form: Form = "stream"

    @property
    def has_grad(self) -> bool:
        """A gradient comes back."""
        return self.role == "compute"


Border = Mapping[str, BorderTensor]
"""All that crosses one border, by name."""


# How one tensor lies along one axis of a mesh.


@dataclass(frozen=True, slots=True)
class Shard:
    """Divided along tensor dimension ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank of the axis."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""


Placement = Shard | Replicate | Partial
