"""Initial values that depend on the seed, the parameter's name and the global index alone.

Every plan starts from the same bits, on every machine: the random bits come from the counter-based
Philox generator, and the way from bits to normal values uses IEEE additions, multiplications,
divisions and square roots only. Library sines and logarithms differ between processors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.plan.box import Box
from weft.plan.model import ParamSpec

_Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", _Floats, Tensor)
LANES = 4
"""64-bit words that Philox makes from one counter."""
HOST = torch.device("cpu")
STEP = 2.0**-52
ROOT_HALF = math.sqrt(0.5)
_BLOCK = 1 << 14
"""Values made at once: their temporaries stay in a core's cache."""


def initial_values(
    seed: int, spec: ParamSpec, box: Box, dtype: torch.dtype, device: torch.device = HOST
) -> Tensor:
    """The elements ``box`` of a parameter at the start, ``[*box.size]``, on ``device`` where that
    makes the same bits, else on the CPU.

    Computed in fp64 and rounded once to fp32, then to ``dtype`` unless that is fp64; so any
    two boxes agree on every element they share, bit for bit, and fp32 is fp64 rounded.
    """
    assert Box.whole(spec.shape).contains(box) or not box.numel, f"{box} in {spec.name}"
    if spec.init.kind != "normal":
        return torch.full(box.size, float(spec.init.kind == "ones"), dtype=dtype)
    key, runs, done = _key(seed, spec.name), _runs(spec.shape, box), 0
    if device.type != HOST.type:
        from weft.nn.init_elsewhere import has_same_bits, normal_on

        if has_same_bits(device):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            made = torch.empty(box.numel, dtype=dtype, device=device)
            for each in normal_on(device, key, runs):
                made[done : done + len(each)] = (each * spec.init.std).to(wide)
                done += len(each)
            return made.view(box.size)
    values = np.empty(box.numel, np.float64 if dtype == torch.float64 else np.float32)
    for part in normal(key, runs):
        np.multiply(part, spec.init.std, out=values[done : done + part.size], casting="same_kind")
        done += part.size
    return torch.from_numpy(values).reshape(box.size).to(dtype)


def _key(seed: int, name: str) -> int:
    """128 bits that tell this parameter's stream from all others."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """(first flat index, length) of the consecutive elements of a box, in row-major order."""
    if not box.numel:
        return
    dims = len(shape)
    while dims > 1 and box.size[dims - 1] == shape[dims - 1]:
        dims -= 1  # whole trailing dimensions join the run
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    inner = max(dims - 1, 0)
    first = box.offset[inner] * strides[inner] if shape else 0
    size = math.prod(box.size[inner:])
    outer = [range(o, o + n) for o, n in zip(box.offset[:inner], box.size[:inner], strict=True)]
    for index in product(*outer):
        yield first + sum(i * s for i, s in zip(index, strides, strict=False)), size


def normal(key: int, runs: Iterator[tuple[int, int]]) -> Iterator[_Floats]:
    """Standard normal values of one stream at the flat indices of ``runs``, in order."""
    for pieces in _batches(runs):
        words = _words(key, pieces)
        values, end = _box_muller(words), 0
        for low, size in pieces:
            skipped = low % LANES
            yield values[end + skipped : end + skipped + size]
            end += _padded(low, size)


def _batches(runs: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Long runs cut, short ones put together: about ``_BLOCK`` values each."""
    batch: list[tuple[int, int]] = []
    held = 0
    for start, size in runs:
        for low in range(start, start + size, _BLOCK):
            piece = min(_BLOCK, start + size - low)
            if held + piece > _BLOCK:
                yield batch
                batch, held = [], 0
            batch.append((low, piece))
            held += piece
    if batch:
        yield batch


def _padded(low: int, size: int) -> int:
    """Words of the whole counters that the values ``low .. low + size - 1`` touch."""
    return LANES * (-(-(low + size) // LANES) - low // LANES)


def _words(key: int, pieces: list[tuple[int, int]]) -> NDArray[np.uint64]:
    """The pieces' words one after the other; word number i of a stream depends on (key, i)."""
    counter = pieces[0][0] // LANES
    stream = np.random.Philox(key=key, counter=counter)
    words = np.empty(sum(_padded(*piece) for piece in pieces), np.uint64)
    end = 0
    for low, size in pieces:
        stream.advance(low // LANES - counter)
        length = _padded(low, size)
        words[end : end + length] = stream.random_raw(length)
        end, counter = end + length, (low + size + LANES - 1) // LANES
    return words


def _box_muller(words: NDArray[np.uint64]) -> _Floats:
    """Normal values ``2 j`` and ``2 j + 1`` from the words ``2 j`` and ``2 j + 1``."""
    radius_bits, angle_bits = words[0::2], words[1::2]
    uniform = ((radius_bits >> np.uint64(12)).astype(np.float64) + 0.5) * STEP
    radius = np.sqrt(_minus_log(uniform))
    first, second = _on_circle(angle_bits)
    values = np.empty(words.shape)
    np.multiply(radius, first, out=values[0::2])
    np.multiply(radius, second, out=values[1::2])
    return values


LN2 = 0.6931471805599453
LOG_SERIES = [2.0 / n for n in (13, 11, 9, 7, 5, 3, 1)]
SIN_SERIES = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]
COS_SERIES = [(-1.0) ** n / math.factorial(2 * n) for n in range(7, -1, -1)]


def _minus_log(x: _Floats) -> _Floats:
    """``-log(x)`` for ``0 < x < 1`` to about 1e-12: exponent, then the series of atanh."""
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    small = mantissa < ROOT_HALF
    mantissa = np.where(small, 2 * mantissa, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    tail = horner(LOG_SERIES, ratio * ratio)
    result: _Floats = (small - exponent) * LN2 - ratio * tail
    return result


def _on_circle(bits: NDArray[np.uint64]) -> tuple[_Floats, _Floats]:
    """``sqrt(2) cos`` and ``sqrt(2) sin`` of a uniform angle, to about 1e-13.

    Two bits choose the signs, the rest an angle ``b`` within an eighth of a turn of the
    diagonal, where the sums of cos(b) and sin(b) are what is wanted.
    """
    low, high = beside_diagonal((bits >> np.uint64(12)).astype(np.float64))
    first = 1.0 - 2.0 * (bits & np.uint64(1)).astype(np.float64)
    second = 1.0 - (bits & np.uint64(2)).astype(np.float64)
    return low * first, high * second


def beside_diagonal(fraction: Numbers) -> tuple[Numbers, Numbers]:
    """``sqrt(2) cos`` and ``sqrt(2) sin`` of an angle of the first quadrant, by 52 bits."""
    b = (fraction + 0.5) * (STEP * math.pi / 2) - math.pi / 4
    square = b * b
    sin, cos = b * horner(SIN_SERIES, square), horner(COS_SERIES, square)
    return cos - sin, cos + sin


def horner(coefficients: list[float], x: Numbers) -> Numbers:
    """A polynomial, highest power first."""
    total = x * coefficients[0]
    total += coefficients[1]
    for coefficient in coefficients[2:]:
        total *= x
        total += coefficient
    return total
