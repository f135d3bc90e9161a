"""Buckets as arithmetic: every element is kept by exactly one of its holders, at one place."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weft.parallel.buckets import ALIGN, fill_buckets
from weft.parallel.params import Held
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import ZeroLevel

SHAPES = st.lists(st.integers(1, 30), max_size=3).map(tuple)


def held(
    name: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    level: ZeroLevel,
    domains: tuple[tuple[int, ...], ...] = (),
    shares: tuple[int, ...] = (),
) -> Held:
    part = int(name) // 3
    spec = ParamSpec(name=name, shape=shape, unit=part, init=Init("zeros"), decay=False)
    return Held(spec, Box.whole(shape), ranks, level, domains=domains, shares=shares)


@st.composite
def pieces(draw: st.DrawFn) -> list[Held]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=12))
    groups = st.sampled_from(
        [((0, 1), ()), ((0, 2, 5), ()), ((0, 2), ((2,), (0,))), ((1, 2, 3, 4), ((2, 3, 4), (1,)))]
    )
    levels: st.SearchStrategy[ZeroLevel] = st.sampled_from([0, 1, 2, 3])
    drawn = ((shape, draw(groups), draw(levels)) for shape in shapes)
    unlike: dict[tuple[int, ...], tuple[int, ...]] = {
        (0, 1): (1, 7), (0, 2, 5): (0, 3, 0), (1, 2, 3, 4): (5, 0, 2, 1)
    }  # fmt: skip
    some = unlike if draw(st.booleans()) else {}
    return [
        held(str(n), shape, ranks, level, domains, some.get(ranks, ()) if level else ())
        for n, (shape, (ranks, domains), level) in enumerate(drawn)
    ]


@given(pieces(), st.sampled_from([400, 4000, 10**6]))
def test_every_element_is_kept_once(every: Sequence[Held], bucket_bytes: int) -> None:
    buckets = fill_buckets(every, 4, bucket_bytes)
    packed = [entry.held for bucket in buckets for entry in bucket.entries]
    assert sorted(packed, key=lambda h: h.spec.name) == sorted(every, key=lambda h: h.spec.name)
    for bucket in buckets:
        last = 0
        for entry in bucket.entries:
            assert entry.start % ALIGN == 0
            assert last <= entry.start
            last = entry.stop
        assert last <= min(map(bucket.numel, bucket.ranks))
        for near in bucket.domains if bucket.level else ():
            assert bucket.numel(near[0]) == sum(map(bucket.segment, near))
            places = [
                (stretch.start + i, stretch.held.spec.name)
                for rank in near
                for stretch in bucket.kept(rank)
                for i in range(stretch.box.numel)
            ]
            assert places == [
                (entry.start + i, entry.held.spec.name)
                for entry in bucket.entries
                for i in range(entry.held.box.numel)
            ]
        if bucket.level == 3:
            assert len({entry.held.spec.unit for entry in bucket.entries}) == 1
        elif len(bucket.entries) > 1:
            assert last * 4 <= bucket_bytes


@given(pieces())
def test_a_segment_is_at_most_its_share_and_some_padding(every: Sequence[Held]) -> None:
    for bucket in fill_buckets(every, 4):
        if bucket.level:
            used, whole = bucket.entries[-1].stop, bucket.entries[0].held
            for near in bucket.domains:
                shares = whole.shares_of(near) or (1,) * len(near)
                for rank, share in zip(near, shares, strict=True):
                    most = bucket.segment(rank) - used * share / sum(shares)
                    assert abs(most) < 2 * ALIGN
                    assert share or not bucket.segment(rank)


def test_holders_agree_whatever_else_they_hold() -> None:
    shared = [held(str(n), (70, 3), (0, 1), 1) for n in range(9)]
    own = [held(str(n), (50,), (0, 2), 1) for n in range(9, 14)]
    mixed = sorted(shared + own, key=lambda h: h.spec.name)
    of_both = [b for b in fill_buckets(mixed, 4, 2000) if b.ranks == (0, 1)]
    assert of_both == fill_buckets(sorted(shared, key=lambda h: h.spec.name), 4, 2000)
    assert len(of_both) > 1
