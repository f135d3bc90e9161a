"""In which order samples are read: a pure function of (seed, epoch, index), in constant memory.

No permutation is ever stored, so any rank can say which sample is at any place of any epoch, and
a run resumes, or goes on with other ranks, by knowing one integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

import numpy as np
import numpy.typing as npt

from weft.data.hashing import Int64Array, UInt64Array, draw, make_key
from weft.plan.tiling import split_by_weight

_ROUNDS, _MOST_ROUNDS, _SMALL_BITS = 8, 16, 8
"""Half-rounds of the Feistel network. Eight leave a bias that a test can see where n is 5 to 7
(chi-squared 33 deviations off after 40,000 draws), so that small n get sixteen."""


def permute(
    seed: int, epoch: int | Int64Array, n: int, index: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """Where ``index`` goes in the permutation of ``0 .. n - 1`` that belongs to (seed, epoch).

    ``index`` and ``epoch`` are integers or arrays that broadcast; the result has their shape.
    For a fixed seed and epoch it is a bijection: a Feistel network over the next power of two
    (Luby and Rackoff, 1988), walked along its cycles until it lands below n (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). Takes constant time and memory an index.
    """
    values, epochs = np.broadcast_arrays(np.asarray(index, np.int64), np.asarray(epoch, np.int64))
    shape = values.shape
    assert n >= 1, f"a permutation of {n} things"
    assert not values.size or (values.min() >= 0 and values.max() < n), f"index outside 0..{n - 1}"
    result = values.ravel().astype(np.uint64)
    bits = max((n - 1).bit_length(), 1)
    rounds = np.arange(_MOST_ROUNDS if bits <= _SMALL_BITS else _ROUNDS, dtype=np.int64)[:, None]
    keys = draw(make_key("order", seed), epochs.ravel()[None, :] * _MOST_ROUNDS + rounds)
    result = _feistel(result, keys, bits)
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        result[outside] = _feistel(result[outside], keys[:, outside], bits)
        outside = outside[result[outside] >= np.uint64(n)]
    return result.astype(np.int64).reshape(shape)


def _feistel(values: UInt64Array, keys: UInt64Array, bits: int) -> UInt64Array:
    """A keyed bijection of ``0 .. 2**bits - 1``. ``keys``: ``[rounds, n]``."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high = (high ^ _stir(low + first)) & high_mask
        low = (low ^ _stir(high + second)) & low_mask
    return (high << np.uint64(low_bits)) | low


def _stir(values: UInt64Array) -> UInt64Array:
    """Cheaper than ``mix`` and enough between rounds; the top half holds the best bits."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values >> np.uint64(32)


@dataclass(frozen=True)
class TrainOrder:
    """Which sample of which source is at every position of an endless stream.

    An epoch has as many positions as all sources have samples, and gives each source a
    number of them in proportion to its weight (largest remainder), spread at random over the
    epoch. Each source is read in passes of its own, each pass a new permutation, going on in the
    next epoch where it stopped: no sample comes a third time before all came twice.
    """

    seed: int
    num_samples: tuple[int, ...]
    """Samples in each source."""
    weights: tuple[float, ...]
    """Part of the stream that each source fills, up to a common factor."""

    def __post_init__(self) -> None:
        assert len(self.num_samples) == len(self.weights) > 0, f"{self}"
        assert min(self.num_samples) > 0 and min(self.weights) > 0, f"{self}"

    @property
    def epoch_samples(self) -> int:
        """Positions in one epoch."""
        return sum(self.num_samples)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Positions of every epoch that each source fills; they add up to the epoch."""
        exact = [Fraction(repr(float(weight))) for weight in self.weights]
        scale = lcm(*(weight.denominator for weight in exact))
        return tuple(split_by_weight(self.epoch_samples, [int(w * scale) for w in exact]))

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(source number, sample number in it) of every position, both ``[n]`` as given."""
        epoch, index = np.divmod(positions, self.epoch_samples)
        slot = permute(self.seed, epoch, self.epoch_samples, index)
        ends = np.cumsum(self.shares)
        source = np.searchsorted(ends, slot, side="right").astype(np.int64)
        sample = np.empty_like(slot)
        for number, (share, size) in enumerate(zip(self.shares, self.num_samples, strict=True)):
            rows = np.flatnonzero(source == number)
            drawn = epoch[rows] * share + slot[rows] - (ends[number] - share)
            passes, place = np.divmod(drawn, size)
            sample[rows] = permute(make_key(self.seed, "source", number), passes, size, place)
        return source, sample
