"""The fingerprint of a batch: the same however it is shared out, another for other data."""

from dataclasses import replace

import numpy as np

from weft.data.batch import Batch
from weft.data.synthetic import SyntheticDataset

DATA = SyntheticDataset(vocab_size=50, seq_len=8, seed=3)


def test_parts_add_up_to_the_whole_in_any_order() -> None:
    whole = DATA.batch(range(6)).fingerprint()
    parts = [DATA.batch(part).fingerprint() for part in ([5, 1], [0], [2, 4, 3])]
    assert sum(parts) == whole < 6 * 2**32


def changed(batch: Batch, tokens: np.ndarray) -> Batch:
    return replace(batch, tokens=tokens)


def test_a_token_or_an_order_that_changed_shows() -> None:
    batch = DATA.batch(range(6))
    swapped = batch.tokens[[1, 0, 2, 3, 4, 5]]
    other = batch.tokens.copy()
    other[3, 5] += 1
    found = {changed(batch, tokens).fingerprint() for tokens in (batch.tokens, swapped, other)}
    assert len(found) == 3
    assert DATA.batch(range(1, 7)).fingerprint() not in found
