"""The order of samples: bijections, uniform, weights respected, a pure function."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.data.order import TrainOrder, permute

SEEDS = st.integers(0, 2**63)


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 700))
def test_every_epoch_is_a_bijection(seed: int, epoch: int, n: int) -> None:
    assert sorted(permute(seed, epoch, n, np.arange(n)).tolist()) == list(range(n))


@given(SEEDS, st.integers(1, 2**40), st.data())
def test_one_index_alone_goes_where_it_goes_among_others(
    seed: int, n: int, data: st.DataObject
) -> None:
    places = st.tuples(st.integers(0, 50), st.integers(0, n - 1))
    pairs = data.draw(st.lists(places, min_size=1, max_size=20))
    epochs, indices = np.array(pairs).T
    together = permute(seed, epochs, n, indices)
    assert together.min() >= 0 and together.max() < n
    for (epoch, index), found in zip(pairs, together, strict=True):
        assert permute(seed, epoch, n, index) == found


@pytest.mark.parametrize(
    ("n", "num_epochs"),
    [(2, 20_000), (3, 20_000), (5, 40_000), (6, 40_000), (12, 10_000), (99, 4_000)],
)
def test_every_place_is_as_likely_as_any_other(n: int, num_epochs: int) -> None:
    """Chi-squared of (index, place) over many epochs; the limit is six standard deviations."""
    epochs = np.repeat(np.arange(num_epochs), n)
    places = permute(11, epochs, n, np.tile(np.arange(n), num_epochs)).reshape(num_epochs, n)
    expected = num_epochs / n
    for index in range(n):
        counts = np.bincount(places[:, index], minlength=n)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < n - 1 + 6 * (2 * (n - 1)) ** 0.5, (index, counts)


def test_all_orders_of_four_occur() -> None:
    epochs = np.repeat(np.arange(3000), 4)
    orders = Counter(map(tuple, permute(3, epochs, 4, np.tile(np.arange(4), 3000)).reshape(-1, 4)))
    assert len(orders) == 24
    assert max(orders.values()) < 3 * min(orders.values()), orders


def test_neighbours_do_not_stay_together() -> None:
    """Steps between successive samples of a large epoch are uncorrelated with the order."""
    n = 50_000
    order = permute(5, 0, n, np.arange(n)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03  # 6 / sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03


def test_seeds_and_epochs_differ() -> None:
    orders = [permute(seed, epoch, 1000, np.arange(1000)) for seed in (1, 2) for epoch in (0, 1)]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert (order == other).sum() < 20  # 1 expected by chance


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Written down once: a change of these numbers breaks the resuming of every old run."""
    assert permute(1234, 0, 10, np.arange(10)).tolist() == GOLDEN_TEN
    order = TrainOrder(1234, (7, 5), (1.0, 2.0))
    source, sample = order.locate(np.array([0, 1, 2, 1_000_000]))
    assert (source.tolist(), sample.tolist()) == GOLDEN_TWO_SOURCES


GOLDEN_TEN = [3, 2, 9, 0, 8, 6, 1, 5, 7, 4]
GOLDEN_TWO_SOURCES = ([0, 0, 1, 0], [6, 4, 2, 6])

ORDERS = st.builds(
    lambda seed, parts: TrainOrder(seed, *map(tuple, zip(*parts, strict=True))),
    SEEDS,
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 10)), min_size=1, max_size=4),
)


@given(ORDERS, st.integers(0, 100))
def test_each_epoch_divides_by_weight(order: TrainOrder, epoch: int) -> None:
    n = order.epoch_samples
    source, sample = order.locate(np.arange(epoch * n, (epoch + 1) * n))
    counts = np.bincount(source, minlength=len(order.weights))
    for number, (count, weight) in enumerate(zip(counts, order.weights, strict=True)):
        assert abs(count - n * weight / sum(order.weights)) < 1
        assert (sample[source == number] < order.num_samples[number]).all()


@given(ORDERS)
def test_no_sample_comes_again_before_all_of_its_source_came(order: TrainOrder) -> None:
    n = order.epoch_samples
    source, sample = order.locate(np.arange(3 * n))
    for number, size in enumerate(order.num_samples):
        # In the order of the draws of each epoch, the passes follow each other.
        times = Counter(sample[source == number].tolist())
        drawn = 3 * order.shares[number]
        assert set(times.values()) <= {drawn // size, -(-drawn // size)}


def test_a_single_source_is_read_once_an_epoch() -> None:
    order = TrainOrder(9, (1000,), (0.3,))
    for epoch in range(3):
        sample = order.locate(np.arange(epoch * 1000, (epoch + 1) * 1000))[1]
        assert sorted(sample.tolist()) == list(range(1000))


def test_a_small_source_is_spread_over_the_epoch() -> None:
    order = TrainOrder(2, (900, 100), (0.5, 0.5))
    source, _ = order.locate(np.arange(1000))
    in_tenths = source.reshape(10, 100).sum(axis=1)
    assert in_tenths.min() > 25 and in_tenths.max() < 75  # 50 expected, deviation 4.7


def test_positions_may_be_asked_in_any_order() -> None:
    order = TrainOrder(4, (13, 8, 2), (1, 1, 0.5))
    positions = np.arange(200)
    together = np.stack(order.locate(positions))
    shuffled = np.random.default_rng(0).permutation(positions)
    assert np.array_equal(np.stack(order.locate(shuffled)), together[:, shuffled])
