"""Made-up samples with everything that real ones may have, for tests of exactness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.data.batch import Batch, Positions, as_positions
from weft.data.hashing import draw, draw_unit, make_key


@dataclass(frozen=True)
class SyntheticDataset:
    """Random tokens, loss weights and documents; each a pure function of (seed, position).

    Weights lie in [0, 2), about 30 % are exactly 0, and about one sample in ten has no weight at
    all. A new document begins at about one token in sixteen. Its own specification: ``open``.
    """

    vocab_size: int
    seq_len: int
    seed: int

    def open(self) -> SyntheticDataset:
        """Nothing to open: the dataset itself."""
        return self

    def batch(self, positions: Positions) -> Batch:
        """The samples at ``positions`` (any integers from 0), each ``[seq_len]`` long."""
        samples = as_positions(positions)
        span = self.seq_len + 1
        counters = samples[:, None] * span + np.arange(span)  # [n, seq + 1]
        drawn = draw(make_key(self.seed, "tokens"), counters) >> np.uint64(16)
        stream = (drawn % np.uint64(self.vocab_size)).astype(np.int32)
        places = counters[:, :-1]
        weights = 2 * draw_unit(make_key(self.seed, "weights"), places)
        weights[draw_unit(make_key(self.seed, "zeros"), places) < 0.23] = 0
        weights[draw_unit(make_key(self.seed, "empty"), samples) < 0.1] = 0
        begins = draw_unit(make_key(self.seed, "documents"), places) < 1 / 16
        begins[:, 0] = False
        return Batch(
            tokens=stream[:, :-1].copy(),
            targets=stream[:, 1:].copy(),
            weights=weights.astype(np.float32),
            segments=np.cumsum(begins, axis=1, dtype=np.int32),
            samples=samples,
        )
