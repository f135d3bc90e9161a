"""The normal values of ``weft.nn.init``, bit for bit, made by a device.

A processor's core makes some tens of millions a second, and a card has to wait for them. Every
operation is one of PyTorch's own kernels, which rounds once: 64-bit integers, and additions,
multiplications, divisions and square roots in fp64. Whether a device does that right is tried
before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from weft.nn.init import LANES, LN2, LOG_SERIES, ROOT_HALF, STEP, beside_diagonal, horner, normal
from weft.nn.tried import works

_COUNTERS = 1 << 21
"""Of the generator at once: a card computes longer than its host takes to begin the next operation,
and temporaries take about half a gigabyte."""
_PIECE = LANES * _COUNTERS // 2
"""Longer runs are cut."""
_TRIED = (1 << 16) + 3
_ROUNDS = 10
_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
"""Of Philox 4 x 64 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
_LOW = 0xFFFFFFFF

Run = tuple[int, int]


@cache
def has_same_bits(device: torch.device) -> bool:
    """What the device makes is what the processor makes, as far as many values tell."""
    key, run = 0x0123456789ABCDEF_FEDCBA9876543210, (5, _TRIED)
    known = np.concatenate(list(normal(key, iter([run]))))

    def agrees() -> bool:
        found = torch.cat(list(normal_on(device, key, iter([run])))).cpu().numpy()
        return bool(np.array_equal(known.view(np.int64), found.view(np.int64)))

    return works(agrees)


def normal_on(device: torch.device, key: int, runs: Iterator[Run]) -> Iterator[Tensor]:
    """As ``weft.nn.init.normal``: standard normal values of one stream at flat indices, in order,
    ``[any number]`` in fp64 each."""
    for starts, size in _alike(runs):
        first = torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
        blocks = (size + 2 * (LANES - 1)) // LANES
        counters = first // LANES + torch.arange(blocks, device=device)
        words = torch.stack(_philox(counters + 1, key), -1).flatten(1)  # [runs, LANES * blocks]
        values = _box_muller(words)
        if len(starts) == 1:
            skipped = starts[0] % LANES
            yield values[0, skipped : skipped + size]
        else:
            place = first % LANES + torch.arange(size, device=device)
            yield values.gather(1, place).flatten()


def _alike(runs: Iterator[Run]) -> Iterator[tuple[list[int], int]]:
    """First indices of runs of the same length, which follow one another; long ones are cut."""
    starts: list[int] = []
    size = 0
    for start, length in runs:
        for low in range(start, start + length, _PIECE):
            piece = min(_PIECE, start + length - low)
            if starts and (piece != size or (len(starts) + 1) * (size + 2 * LANES) > 2 * _PIECE):
                yield starts, size
                starts = []
            starts.append(low)
            size = piece
    if starts:
        yield starts, size


def _philox(counter: Tensor, key: int) -> list[Tensor]:
    """The four words of each counter. All numbers are int64 with the bits of unsigned ones."""
    nothing = torch.zeros_like(counter)
    words = [counter, nothing, nothing, nothing]
    keys = [key & (2**64 - 1), key >> 64]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = (
            _product(factor, words[place]) for factor, place in zip(_FACTORS, (0, 2), strict=True)
        )
        words = [
            high1 ^ words[1] ^ _signed(keys[0]), low1, high0 ^ words[3] ^ _signed(keys[1]), low0,
        ]  # fmt: skip
        keys = [(each + step) % 2**64 for each, step in zip(keys, _WEYL, strict=True)]
    return words


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of a product, by halves."""
    low, high = word & _LOW, _shifted(word, 32)
    factor_low, factor_high = factor & _LOW, factor >> 32
    crossed, other = low * factor_high, high * factor_low
    carried = _shifted(low * factor_low, 32) + (crossed & _LOW) + (other & _LOW)
    top = high * factor_high + _shifted(crossed, 32) + _shifted(other, 32)
    return top + _shifted(carried, 32), word * _signed(factor)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    result: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return result


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _box_muller(words: Tensor) -> Tensor:
    """As ``weft.nn.init`` makes them of pairs of words along the last dimension."""
    uniform = (_shifted(words[..., 0::2], 12).double() + 0.5) * STEP
    radius = root(_minus_log(uniform))
    first, second = _on_circle(words[..., 1::2])
    return torch.stack((radius * first, radius * second), -1).flatten(-2)


def _minus_log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    small = mantissa < ROOT_HALF
    mantissa = torch.where(small, 2 * mantissa, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    tail = horner(LOG_SERIES, ratio * ratio)
    result: Tensor = (small.int() - exponent).double() * LN2 - ratio * tail
    return result


def root(x: Tensor) -> Tensor:
    """Rounded to the nearest on cards; PyTorch's own on a processor sometimes is one bit off."""
    return x.sqrt()


def _on_circle(bits: Tensor) -> tuple[Tensor, Tensor]:
    low, high = beside_diagonal(_shifted(bits, 12).double())
    first = 1.0 - 2.0 * (bits & 1).double()
    second = 1.0 - (bits & 2).double()
    return low * first, high * second
