"""What a rank gives to a checkpoint: boxes of logical tensors that lie on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.entry import WIDTHS, Piece, RankFile
from weft.checkpoint.rank_file import write_pieces
from weft.plan.box import Box

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the safetensors code: every dtype that can be stored."""
assert DTYPES.keys() == WIDTHS.keys(), "a dtype without a width"

DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Shard:
    """One box of one logical tensor, to be written by the one rank that owns it."""

    name: str
    """Logical name in the unsplit model."""
    kind: str
    """``param``, ``exp_avg``, ``exp_avg_sq``, ...: which of the tensors of that name."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor."""
    box: Box
    """The elements that ``tensor`` holds."""
    tensor: Tensor
    """Shape ``box.size``, on any device."""

    def __post_init__(self) -> None:
        assert self.tensor.dtype in DTYPE_CODES, f"{self.name} is {self.tensor.dtype}"
        key, found = self.piece.key, tuple(self.tensor.shape)
        assert found == self.box.size, f"{key} holds {found}"

    @cached_property
    def piece(self) -> Piece:
        """What a file holds of it, but for the elements."""
        return Piece(self.name, self.kind, self.shape, self.box, DTYPE_CODES[self.tensor.dtype])


def write_rank(folder: Path, rank: int, shards: Sequence[Shard]) -> RankFile:
    """Write the boxes that ``rank`` owns, through to the disk: ``write_pieces``, from tensors.

    They must not change until it returns; a device's tensors come to the host one at a time.
    """
    return write_pieces(folder, rank, *elements_of(shards))


def elements_of(shards: Sequence[Shard]) -> tuple[list[Piece], Callable[[Piece], memoryview]]:
    """The pieces that are given, and what brings the elements of one to the host."""
    tensors = {shard.piece: shard.tensor for shard in shards}
    assert len(tensors) == len(shards), "a box is written twice"
    return list(tensors), lambda piece: bytes_of(tensors[piece].detach().to("cpu"))


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements in row-major order; a copy only if they are not stored so."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
