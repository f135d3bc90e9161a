"""Axes that divide one dimension, or two, against counting elements one by one.

The toy axes here are no axes of Weft: a zigzag, which gives each rank two ranges, and one that
divides the same dimension once more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.axes.axis import Axis, consecutive, divisible
from weft.axes.held import boxes_of, held, tiling
from weft.plan.box import Box
from weft.plan.layout import Dim, Form
from weft.plan.mesh import AXES, Mesh
from weft.plan.tiling import Stored, moves, refine


class Toy(Axis):
    """Divides the dimensions it is told to, into consecutive parts."""

    def __init__(self, name: str, *dims: str) -> None:
        self.name = name
        self._dims = dims

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name in self._dims

    def part(
        self, dim: Dim, ways: int, position: int, _shares: Sequence[int] = ()
    ) -> tuple[range, ...]:
        return (consecutive(dim, ways, position),)

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return all(divisible(dim, ways) for dim in dims)

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        raise NotImplementedError


class Zigzag(Toy):
    """The ``n``-th of ``2 * ways`` parts from the start and the ``n``-th from the end: what makes
    the work of causal attention even."""

    def part(
        self, dim: Dim, ways: int, position: int, _shares: Sequence[int] = ()
    ) -> tuple[range, ...]:
        ends = (position, 2 * ways - 1 - position)
        found = [consecutive(dim, 2 * ways, n) for n in ends]
        return tuple(part for part in found if part) or (found[0],)


# Names of axes that a mesh may have; what they divide here is the tests' choice.
OUTER, MIDDLE, INNER = USED = AXES[:3]
ZIGZAG_THEN_EVEN: Mapping[str, Axis] = {
    OUTER: Toy(OUTER, "samples"),
    MIDDLE: Zigzag(MIDDLE, "seq"),
    INNER: Toy(INNER, "seq", "heads"),
}


def elements(boxes: Iterable[Box]) -> list[tuple[int, ...]]:
    """Indices of boxes, one by one, in the order of the boxes."""
    return [i for box in boxes for i in product(*(range(s.start, s.stop) for s in box.slices()))]


def test_a_zigzag_gives_each_rank_two_ranges() -> None:
    mesh = Mesh.of((0, 1), **{MIDDLE: 2})
    boxes = tiling([Dim(name="seq", size=8)], "stream", mesh, ZIGZAG_THEN_EVEN).boxes
    assert boxes == {0: (Box((0,), (2,)), Box((6,), (2,))), 1: (Box((2,), (4,)),)}


def test_an_axis_divides_what_the_zigzag_left() -> None:
    mesh = Mesh.of(range(4), **{MIDDLE: 2, INNER: 2})
    boxes = tiling([Dim(name="seq", size=16)], "stream", mesh, ZIGZAG_THEN_EVEN).boxes
    assert boxes == {  # of [0..4) and [12..16), and of [4..12)
        0: (Box((0,), (4,)),),
        1: (Box((12,), (4,)),),
        2: (Box((4,), (4,)),),
        3: (Box((8,), (4,)),),
    }


def test_two_axes_divide_heads_without_cutting_one() -> None:
    """Six key heads of two queries of three channels, divided in three and then in four: a key
    head of the last part is shared, its queries are not."""
    axes = {MIDDLE: Toy(MIDDLE, "heads", "keys"), INNER: Toy(INNER, "heads", "keys")}
    mesh = Mesh.of(range(12), **{MIDDLE: 3, INNER: 4})
    heads = Dim(name="heads", size=36, groups=6, units=2)
    keys = Dim(name="keys", size=18, groups=6, shared=True)
    found = tiling([heads], "param", mesh, axes).boxes
    assert [box.offset[0] for (box,) in found.values()] == list(range(0, 36, 3))
    shared = tiling([keys], "param", mesh, axes).boxes
    assert [box.offset[0] for (box,) in shared.values()] == [0, 0, 3, 3, 6, 6, 9, 9, 12, 12, 15, 15]


SIZES = st.integers(1, 3)


@st.composite
def meshes(draw: st.DrawFn, first: int = 0) -> Mesh:
    sizes = {name: draw(SIZES) for name in draw(st.permutations(USED))}
    many = 1
    for size in sizes.values():
        many *= size
    return Mesh.of(range(first, first + many), **sizes)


@st.composite
def dims(draw: st.DrawFn) -> list[Dim]:
    """At most one of those that the inner axis divides."""
    names = draw(st.permutations(["samples", draw(st.sampled_from(["seq", "heads"])), "other"]))
    return [Dim(name=name, size=draw(st.integers(1, 13))) for name in names]


@given(dims(), meshes())
def test_parts_cover_a_tensor_and_are_held_as_often_as_axes_do_not_divide(
    dims: list[Dim], mesh: Mesh
) -> None:
    axes = ZIGZAG_THEN_EVEN
    tiled = tiling(dims, "stream", mesh, axes)
    counts = Counter(i for boxes in tiled.boxes.values() for i in elements(boxes))
    copies = 1
    for name, axis in axes.items():
        if not any(axis.divides(dim, "stream") for dim in dims):
            copies *= mesh.size(name)
    for index in elements([Box.whole([dim.size for dim in dims])]):
        assert counts[index] == copies, index


@given(dims(), meshes())
def test_every_axis_takes_a_part_of_what_the_ones_before_it_left(
    dims: list[Dim], mesh: Mesh
) -> None:
    for rank in mesh.ranks:
        position = mesh.coordinate(rank)
        known: dict[str, Axis] = {}
        before: set[tuple[int, ...]] | None = None
        for name, axis in ZIGZAG_THEN_EVEN.items():
            known[name] = axis
            now = set(elements(boxes_of(held(dims, "stream", mesh, position, known))))
            assert before is None or now <= before
            before = now


@given(st.data())
def test_moves_between_zigzags_bring_each_rank_its_own_elements(data: st.DataObject) -> None:
    """Run by hand on real tensors, stored as ``Stored`` says."""
    parts = data.draw(dims())
    before, after = data.draw(meshes()), data.draw(meshes(first=40))
    source = tiling(parts, "stream", before, ZIGZAG_THEN_EVEN)
    target = tiling(parts, "stream", after, ZIGZAG_THEN_EVEN)
    whole = torch.arange(prod(source.shape)).view(source.shape)
    stores = {**_stores(source.boxes), **_stores(target.boxes)}
    local = {rank: torch.full(stored.size, -1) for rank, stored in stores.items()}
    for rank, boxes in source.boxes.items():
        for box in boxes:
            if box.numel:
                local[rank][stores[rank].slices(box)] = whole[box.slices()]
    for move in moves(source, target):
        given = local[move.src][stores[move.src].slices(move.box)]
        local[move.dst][stores[move.dst].slices(move.box)] = given
    for rank in target.boxes:
        ranges = held(parts, "stream", after, after.coordinate(rank), ZIGZAG_THEN_EVEN)
        expected = whole
        for number, each in enumerate(ranges):
            index = torch.tensor([i for part in each for i in part], dtype=torch.int64)
            expected = expected.index_select(number, index)
        assert torch.equal(local[rank], expected)


def _stores(boxes: Mapping[int, tuple[Box, ...]]) -> dict[int, Stored]:
    return {rank: Stored(each) for rank, each in boxes.items()}


@given(dims(), meshes())
def test_every_piece_of_a_refinement_lies_in_one_place_of_each_holder(
    dims: list[Dim], mesh: Mesh
) -> None:
    tiled = tiling(dims, "stream", mesh, ZIGZAG_THEN_EVEN)
    seen: Counter[int] = Counter()
    for box, ranks in refine(tiled):
        for rank in ranks:
            slices = Stored(tiled.boxes[rank]).slices(box)
            assert tuple(s.stop - s.start for s in slices) == box.size
            seen[rank] += box.numel
    assert seen == Counter({r: sum(b.numel for b in boxes) for r, boxes in tiled.boxes.items()})
