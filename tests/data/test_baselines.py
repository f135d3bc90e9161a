"""Baselines against counting with dictionaries, and against what theory says."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.baselines import baselines

VOCAB = 5
STREAMS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)
TARGETS = st.lists(
    st.tuples(
        st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1), st.sampled_from([0.0, 0.5, 1.0, 2.0])
    ),
    min_size=1,
    max_size=20,
)


def counted(train: list[int], pairs: list[tuple[int, int, float]]) -> tuple[float, float]:
    """Add-one unigram and Witten-Bell bigram, as the textbook writes them."""
    count = Counter(train)
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    for a, b in pairwise(train):
        followers[a][b] += 1
    sums, total = [0.0, 0.0], 0.0
    for a, b, weight in pairs:
        unigram = (count[b] + 1) / (len(train) + VOCAB)
        seen, different = followers[a].total(), len(followers[a])
        bigram = unigram
        if seen:
            trust = seen / (seen + different)
            bigram = trust * followers[a][b] / seen + (1 - trust) * unigram
        sums[0] -= weight * math.log(unigram)
        sums[1] -= weight * math.log(bigram)
        total += weight
    return sums[0] / total, sums[1] / total


@settings(deadline=None)
@given(STREAMS, TARGETS)
def test_both_losses_are_what_counting_gives(
    train: list[int], pairs: list[tuple[int, int, float]]
) -> None:
    pairs = [*pairs, (0, 1, 1.0)]
    before, after, weights = (np.array(column) for column in zip(*pairs, strict=True))
    found = baselines(
        np.array(train), contexts=before, targets=after, weights=weights, vocab_size=VOCAB
    )
    assert (found.unigram, found.bigram) == pytest.approx(counted(train, pairs), rel=1e-12)
    assert found.targets == (weights > 0).sum()


def test_every_context_has_probabilities_that_add_up_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 4, 50)  # token 4 never occurs
    for context in range(VOCAB):
        total = 0.0
        for target in range(VOCAB):
            found = baselines(
                train,
                contexts=np.array([context]),
                targets=np.array([target]),
                weights=np.ones(1),
                vocab_size=VOCAB,
            )
            total += math.exp(-found.bigram)
        assert total == pytest.approx(1, abs=1e-12)


def test_a_chain_is_learned_up_to_its_entropy() -> None:
    """Two equally likely successors a token: the bigram gets to log 2, the unigram not."""
    draw = np.random.default_rng(1)
    stream = [0]
    for coin in draw.integers(0, 2, 60_000):
        stream.append((stream[-1] * 3 + 1 + 5 * coin) % 100)
    train, held_out = np.array(stream[:50_000], np.uint16), np.array(stream[50_000:], np.uint16)
    found = baselines(
        train,
        contexts=held_out[:-1].astype(np.int32),
        targets=held_out[1:].astype(np.int32),
        weights=np.ones(len(held_out) - 1, np.float32),
        vocab_size=100,
    )
    assert math.log(2) < found.bigram < math.log(2) + 0.02
    assert found.unigram > found.bigram + 1


def test_weights_of_zero_leave_targets_out() -> None:
    arrays = {
        "contexts": np.array([[0, 1], [2, 3]]),
        "targets": np.array([[1, 2], [3, 4]]),
        "vocab_size": 5,
    }
    train = np.array([0, 1, 2, 3, 4] * 3)
    one = baselines(train, weights=np.array([[0, 1], [0, 0]]), **arrays)
    all_ = baselines(train, weights=np.ones((2, 2)), **arrays)
    assert (one.targets, all_.targets, one.train_tokens) == (1, 4, 15)
    with pytest.raises(AssertionError, match="no target"):
        baselines(train, weights=np.zeros((2, 2)), **arrays)
