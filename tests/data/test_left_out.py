"""Which batch a step reads where some are left out: the others in their order, each once."""

from itertools import count, islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.data.batch import Batch, Positions
from weft.data.left_out import LeftOut, WithoutSpec

RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


@given(ranges=RANGES)
def test_every_other_batch_is_read_once_in_order(ranges: list[tuple[int, int]]) -> None:
    gone = {batch for first, last in ranges for batch in range(first, last + 1)}
    left = list(islice((batch for batch in count() if batch not in gone), 60))
    found = LeftOut.of(ranges)
    assert [found.batch(step) for step in range(60)] == left
    one_by_one = LeftOut()
    for first, last in ranges:
        one_by_one = one_by_one.and_also(first, last)
    assert one_by_one == found
    assert sorted(gone) == [b for first, last in found.ranges for b in range(first, last + 1)]
    assert all(a[1] + 1 < b[0] for a, b in zip(found.ranges, found.ranges[1:], strict=False))


class Positioned:
    """A dataset of which a sample is its position."""

    def open(self) -> "Positioned":
        return self

    def batch(self, positions: Positions) -> Batch:
        rows = np.asarray(positions, np.int64)
        tokens = rows[:, None].astype(np.int32)
        return Batch(tokens, tokens, tokens.astype(np.float32), None, rows)


def test_a_rank_gets_its_own_part_of_other_batches() -> None:
    data = WithoutSpec(Positioned(), LeftOut.of([(1, 2)]), 4).open()
    assert data.batch([2, 3]).samples.tolist() == [2, 3]
    assert data.batch([4, 7, 10]).samples.tolist() == [12, 15, 18]
