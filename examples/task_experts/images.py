"""Three tasks on small images, drawn here: which digit it is, in which corner, how it is turned.

Image number n is the same everywhere and always. Glyphs are of 5 x 7 dots, with noise around them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE, PATCH = 16, 4
TASKS = ("digit", "corner", "turn")
CLASSES = (10, 4, 4)
"""Of each task; all tasks' stand one after the other in the head."""
_ROWS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_GLYPHS = np.array([[[int(dot) for dot in row] for row in glyph.split()] for glyph in _ROWS], float)
_TURNED = (2, 3, 4, 5, 7)
"""Digits that look different in each of four positions."""


def image(number: int) -> tuple[NDArray[np.float64], int, int]:
    """``[SIZE, SIZE]``, its task, and which of that task's classes it is of."""
    draw = np.random.default_rng(number)
    task = number % len(TASKS)
    digit, corner, turn = (int(draw.integers(many)) for many in CLASSES)
    if TASKS[task] == "turn":
        digit = _TURNED[digit % len(_TURNED)]
    glyph = np.rot90(_GLYPHS[digit], turn if TASKS[task] == "turn" else 0)
    high, wide = glyph.shape
    top, left = (int(draw.integers(2)) + (SIZE // 2) * (side) for side in divmod(corner, 2))
    pixels = 0.2 * draw.standard_normal((SIZE, SIZE))
    pixels[top : top + high, left : left + wide] += glyph * draw.uniform(0.7, 1.3)
    return pixels, task, (digit, corner, turn)[task]


def batch(numbers: Iterable[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Images as patches ``[samples, places, PATCH * PATCH]``, their ``tasks`` ``[samples]``, and
    ``targets`` with ``weights`` ``[samples, places]``: the class is read at the first place."""
    drawn = [image(number) for number in numbers]
    places, offsets = (SIZE // PATCH) ** 2, np.cumsum((0, *CLASSES))
    pixels = torch.from_numpy(np.array([each for each, _, _ in drawn]).reshape(-1, SIZE, SIZE))
    patches = pixels.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
    classes = torch.tensor([int(offsets[task]) + found for _, task, found in drawn]).long()
    weights = torch.zeros(len(drawn), places, dtype=torch.float64)
    weights[:, :1] = 1.0
    return {
        "patches": patches.to(dtype),
        "tasks": torch.tensor([task for _, task, _ in drawn]).long(),
        "targets": classes[:, None].expand(-1, places).contiguous(),
        "weights": weights,
    }
