"""Beginnings of held-out text, for the model to continue."""

from __future__ import annotations

import numpy as np

from weft.data.dataset import PackedDataset
from weft.data.tokenizer import Tokenizer

LENGTH = 48
"""Characters of a beginning at most: about a dozen tokens."""
LOST = "\ufffd"
"""A character of which only a part was there."""


def beginnings(held_out: PackedDataset, tokenizer: Tokenizer, count: int) -> tuple[str, ...]:
    """Up to ``count`` different beginnings, from places spread evenly over the held-out text.

    Each begins a document, a line or a word. Empty where nothing is held out.
    """
    total = held_out.num_samples
    places = sorted({(2 * k + 1) * total // (2 * count) for k in range(count)}) if total else []
    found = []
    for row in held_out.batch(places).tokens if places else ():
        ids = np.asarray(row)
        ends = np.flatnonzero(ids == tokenizer.end_id)
        begins = len(ends) > 0 and ends[0] < len(ids) // 2
        text = tokenizer.decode(ids[ends[0] + 1 :] if begins else ids)
        found.append(_beginning(text if begins else _after_a_break(text)))
    return tuple(dict.fromkeys(text for text in found if text))


def _after_a_break(text: str) -> str:
    """From the first line that begins in the first half, or else from the second word."""
    line = text.find("\n")
    if 0 <= line < len(text) // 2:
        return text[line + 1 :]
    first, _, rest = text.partition(" ")
    return rest or first


def _beginning(text: str) -> str:
    text = text.strip(f"{LOST}\n")
    if len(text) <= LENGTH:
        return text.rstrip()
    words = text[:LENGTH].rpartition(" ")[0]
    return (words if words.strip() else text[:LENGTH]).rstrip()
