"""Boxes, tilings and moves against brute force on small index sets."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.box import Box
from weft.plan.tiling import Stored, Tiling, moves, part_of, refine, split_by_weight, split_evenly

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    def interval(size: int) -> st.SearchStrategy[tuple[int, int]]:
        pairs = st.tuples(st.integers(0, size), st.integers(0, size))
        return pairs.map(lambda p: (min(p), max(p) - min(p)))

    intervals = st.tuples(*[interval(size) for size in shape])
    return intervals.map(lambda i: Box(tuple(o for o, _ in i), tuple(s for _, s in i)))


def several_boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[Box, ...]]:
    """Up to three that have nothing in common."""

    def apart(boxes: list[Box]) -> tuple[Box, ...]:
        kept: list[Box] = []
        for box in boxes:
            if all(box.intersect(other) is None for other in kept):
                kept.append(box)
        return tuple(kept)

    return st.lists(boxes_in(shape), min_size=1, max_size=3).map(apart)


def held_by(boxes: tuple[Box, ...]) -> set[tuple[int, ...]]:
    return set().union(*map(indices, boxes))


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*[range(o, o + s) for o, s in zip(box.offset, box.size, strict=True)]))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = draw(SHAPES)
    return draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def tilings(draw: st.DrawFn, count: int = 1) -> list[Tiling]:
    shape = draw(SHAPES)
    ranks = st.dictionaries(st.integers(0, 6), several_boxes_in(shape), max_size=5)
    return [Tiling(shape, draw(ranks)) for _ in range(count)]


@given(two_boxes())
def test_intersection_is_the_common_indices(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (indices(common) if common else set()) == indices(a) & indices(b)


@given(two_boxes())
def test_subtraction_is_disjoint_and_complete(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = a.subtract(b)
    assert sum(box.numel for box in rest) == len(indices(a) - indices(b))
    assert set().union(*map(indices, rest)) == indices(a) - indices(b)


@given(st.data())
def test_stretches_are_boxes_in_row_major_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    inside = sorted(indices(box))  # row-major
    start = data.draw(st.integers(0, len(inside)))
    stop = data.draw(st.integers(start, len(inside)))
    parts = box.stretch(start, stop)
    assert [i for part in parts for i in sorted(indices(part))] == inside[start:stop]
    assert len(parts) <= 2 * len(shape) + 1


@given(tilings(count=2))
def test_moves_deliver_each_element_once_from_the_nearest_holder(pair: list[Tiling]) -> None:
    source, target = pair
    have = set().union(*map(held_by, source.boxes.values()))
    need = set().union(*map(held_by, target.boxes.values()))
    if not need <= have:
        with pytest.raises(ValueError, match="no rank holds"):
            moves(source, target)
        return
    arrived: dict[tuple[int, tuple[int, ...]], int] = {}
    for move in moves(source, target):
        for index in indices(move.box):
            assert (move.dst, index) not in arrived, "delivered twice"
            arrived[move.dst, index] = move.src
    for dst, boxes in target.boxes.items():
        for index in held_by(boxes):
            holders = [r for r, held in source.boxes.items() if index in held_by(held)]
            nearest = min(holders, key=lambda src: (src != dst, abs(src - dst), src))
            assert arrived[dst, index] == nearest
    assert len(arrived) == sum(box.numel for boxes in target.boxes.values() for box in boxes)


@given(tilings())
def test_refinement_names_exactly_the_holders_of_every_element(one: list[Tiling]) -> None:
    (tiling,) = one
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box, ranks in refine(tiling):
        for index in indices(box):
            assert index not in seen, "pieces overlap"
            seen[index] = ranks
    for index in product(*map(range, tiling.shape)):
        holders = tuple(sorted(r for r, b in tiling.boxes.items() if index in held_by(b)))
        assert seen.get(index, ()) == holders


@given(tilings())
def test_uncovered_is_what_no_rank_holds(one: list[Tiling]) -> None:
    (tiling,) = one
    held = set().union(*map(held_by, tiling.boxes.values()))
    missing = set().union(*map(indices, tiling.uncovered()))
    assert missing == set(product(*map(range, tiling.shape))) - held


def test_a_tiling_refuses_boxes_of_a_rank_that_overlap() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        Tiling((4,), {0: (Box((0,), (3,)), Box((2,), (2,)))})


def test_boxes_are_stored_one_after_the_other_along_each_dimension() -> None:
    corners = [Box((row, column), (2, 1)) for row in (6, 0) for column in (1, 4)]
    stored = Stored(corners)
    assert stored.size == (4, 2) and stored.numel == 8
    assert stored.slices(Box((7, 4), (1, 1))) == (slice(1, 2), slice(1, 2))
    assert stored.slices(Box((0, 1), (2, 1))) == (slice(2, 4), slice(0, 1))
    assert stored.contains(Box((0, 4), (1, 1))) and not stored.contains(Box((0, 1), (3, 1)))
    with pytest.raises(AssertionError, match="in none of"):
        stored.slices(Box((2, 1), (1, 1)))
    with pytest.raises(AssertionError, match="no grid"):
        Stored(corners[:3])


def test_distance_decides_between_replicas() -> None:
    whole = (Box.whole((4,)),)
    source = Tiling((4,), {0: whole, 1: whole})
    target = Tiling((4,), {2: whole})
    assert [m.src for m in moves(source, target)] == [1]
    far_from_one = {(1, 2): 9, (0, 2): 1}
    assert [m.src for m in moves(source, target, lambda a, b: far_from_one[a, b])] == [0]


@given(st.integers(0, 1000), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_weighted_shares_add_up_and_are_fair(total: int, weights: list[int]) -> None:
    if not sum(weights):
        weights[0] = 1
    shares = split_by_weight(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1


def test_even_split_gives_the_remainder_to_the_first() -> None:
    assert [part_of(10, 3, n) for n in range(3)] == [range(4), range(4, 7), range(7, 10)]
    assert split_evenly(7, 3) == [3, 2, 2]
    assert split_evenly(1, 3) == [1, 0, 0]
