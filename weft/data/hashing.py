"""Random numbers by counter: what a number is depends on a key and a position, on nothing before.

That is what makes the order of samples, and synthetic data, pure functions that any rank can
evaluate at any place. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(values: UInt64Array) -> UInt64Array:
    """A bijection of 64-bit integers in which every input bit stirs every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return values ^ (values >> np.uint64(31))


def make_key(*parts: int | str) -> int:
    """A 64-bit key from what should set a stream apart: seeds, numbers, the purpose in words."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return identity_hash(text.encode())


def identity_hash(*parts: bytes) -> int:
    """A 64-bit hash of bytes that is the same on every machine and in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def draw(key: int, counters: npt.NDArray[np.int64] | UInt64Array) -> UInt64Array:
    """The uniform 64-bit numbers at ``counters`` (any shape) of the stream of ``key``."""
    scaled = np.atleast_1d(counters).astype(np.uint64) * np.uint64(_GOLDEN)
    return mix(scaled + np.uint64(key & _MASK)).reshape(np.shape(counters))


def draw_unit(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, at ``counters`` of the stream of ``key``."""
    return (draw(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
