"""What the trainer gets for one step, and what gives it: a pure function of sample positions."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Positions = Sequence[int] | npt.NDArray[np.int64]
"""Global sample positions (values of the data cursor), in any order, repeats allowed."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples ready for a model. Every array is its own, writable memory."""

    tokens: npt.NDArray[np.int32]
    """``[n, seq]``."""
    targets: npt.NDArray[np.int32]
    """``[n, seq]``: the token that follows each of ``tokens``."""
    weights: npt.NDArray[np.float32]
    """``[n, seq]``: weight of each target in the loss; 0 leaves it out."""
    segments: npt.NDArray[np.int32] | None
    """``[n, seq]``: number of the document inside the sample, from 0; None: one document."""
    samples: npt.NDArray[np.int64]
    """``[n]``: the position of each row's sample."""
    evened: npt.NDArray[np.float64] | None = None
    """``[2]``: the imbalance of work in the global batch in the order of positions, and as samples
    were given out; None: they were not."""
    places: npt.NDArray[np.int64] | None = None
    """``[n, seq]``: which token of its sample is computed in each place, where that is not its own.
    All else here is in the order of samples."""

    def to_bytes(self) -> bytes:
        """The arrays as ``.npy`` files, one after the other."""
        buffer = io.BytesIO()
        arrays: list[npt.NDArray[Any]] = [self.tokens, self.targets, self.weights, self.samples]
        more = [array for array in (self.segments, self.evened, self.places) if array is not None]
        for array in [*arrays, *more]:
            np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
        return buffer.getvalue()

    def fingerprint(self) -> int:
        """Which tokens are where in the run: a number below 2^32 a sample, added up.

        Parts of a global batch add up to the whole's, so it is the same however it is shared out,
        and it changes when two samples change places. It finds mistakes, not forgers.
        """
        rows = np.ascontiguousarray(self.tokens, dtype="<i4")
        places = self.samples.astype("<i8")
        pairs = zip(places, rows, strict=True)
        return sum(zlib.crc32(row.tobytes(), zlib.crc32(place.tobytes())) for place, row in pairs)

    @staticmethod
    def from_bytes(data: bytes) -> Batch:
        """Read what ``to_bytes`` wrote. No pickle is ever loaded."""
        buffer = io.BytesIO(data)
        arrays = []
        while buffer.tell() < len(data):
            arrays.append(np.lib.format.read_array(buffer, allow_pickle=False))
        assert len(arrays) in (4, 5, 6, 7), f"a batch of {len(arrays)} arrays"
        tokens, targets, weights, samples = arrays[:4]
        segments, evened, places = (*arrays[4:], None, None, None)[:3]
        return Batch(tokens, targets, weights, segments, samples, evened, places)


class Dataset(Protocol):
    """Anything that can give the samples at given positions, the same ones every time."""

    def batch(self, positions: Positions) -> Batch:
        """The samples at ``positions``: a pure function, whatever was asked before."""


class DatasetSpec(Protocol):
    """How to open a dataset in another process: a small picklable dataclass, no open files."""

    def open(self) -> Dataset:
        """Open the dataset here."""


def as_positions(positions: Positions) -> npt.NDArray[np.int64]:
    """Positions as an int64 array ``[n]``."""
    array = np.asarray(positions, dtype=np.int64)
    assert array.ndim == 1, f"positions of shape {array.shape}"
    assert not array.size or array.min() >= 0, f"negative position {array.min()}"
    return array


def spread(num_samples: int, limit: int | None) -> npt.NDArray[np.int64]:
    """At most ``limit`` positions (None: all), spread evenly over ``0 .. num_samples - 1``.

    A short evaluation then sees a little of everything, not the documents that come first.
    """
    if limit is None or limit >= num_samples:
        return np.arange(num_samples, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * num_samples // limit
