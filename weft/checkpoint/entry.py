"""What a checkpoint stores: boxes of logical tensors, and the facts of the files that hold them.

Nothing here knows a rank's layout. A tensor is found by its kind, its logical name and its box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from weft.config.errors import RunError
from weft.plan.box import Box

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the safetensors code of every dtype that can be stored."""

CHUNK_BYTES = 4 << 20
"""What has a checksum of its own: small enough to stay in cache between the checksums and the
write, and to read little more than a part of a tensor needs."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read. Names the file, and the tensor and box if one is."""

    def __init__(self, problem: str, *, file: object = None, tensor: str | None = None) -> None:
        self.problem = problem
        self.file = file
        self.tensor = tensor
        where = [str(part) for part in (file, tensor) if part is not None]
        super().__init__(": ".join([*where, problem]))


@contextmanager
def told(cannot_be: str, file: object = None) -> Iterator[None]:
    """What the file system refuses inside is a CheckpointError: ``cannot be read``, say."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be {cannot_be}: {error.strerror}"
        raise CheckpointError(problem, file=file or error.filename) from error


@contextmanager
def wholly(folder: Path) -> Iterator[None]:
    """What is half written into a folder that was new or empty goes again."""
    was_there = folder.is_dir()
    if was_there and any(folder.iterdir()):
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for file in folder.iterdir():
                file.unlink()
            if not was_there:
                folder.rmdir()
        raise


def box_key(kind: str, name: str, box: Box) -> str:
    """``param/norm.weight[0:64]``: names a stored box in its file and in messages."""
    spans = ",".join(f"{o}:{e}" for o, e in zip(box.offset, box.end, strict=True))
    return f"{kind}/{name}[{spans}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one logical tensor, which one rank's file holds."""

    name: str
    """Logical name in the unsplit model."""
    kind: str
    """``param``, ``exp_avg``, ``exp_avg_sq``, ...: which of the tensors of that name."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor."""
    box: Box
    """The elements that are held."""
    dtype: str
    """A key of ``WIDTHS``."""

    def __post_init__(self) -> None:
        assert self.name and self.kind and "/" not in self.kind, f"kind and name of {self.key!r}"
        assert fits(self.box, self.shape), f"{self.key} is outside {self.shape}"
        assert self.dtype in WIDTHS, f"{self.key} is {self.dtype}"

    @property
    def key(self) -> str:
        return box_key(self.kind, self.name, self.box)

    @property
    def nbytes(self) -> int:
        return self.box.numel * WIDTHS[self.dtype]


def rank_file_name(rank: int, save: str = "") -> str:
    """``rank-00003.safetensors``; with the name of a save where files are not renamed."""
    return f"rank-{rank:05d}{save and '-'}{save}.safetensors"


def _several(checksums: object) -> object:
    return (checksums,) if isinstance(checksums, int) else checksums


Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]


# What follows is written as JSON just as it stands, and checked by pydantic when it is read.


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor in a file."""

    file: str
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    crc32: Annotated[tuple[Count, ...], BeforeValidator(_several)]
    """Of its bytes, row-major: of each ``CHUNK_BYTES`` of them, or one of all."""

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            text = f"offset {self.offset} and size {self.size}: expected equal lengths"
            raise ValueError(text)

    @property
    def box(self) -> Box:
        return Box(self.offset, self.size)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One logical tensor and the boxes that hold it."""

    kind: str
    name: str
    shape: tuple[Count, ...]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(WIDTHS)})$")]
    """A key of ``WIDTHS``."""
    boxes: tuple[StoredBox, ...]

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    def key(self, stored: StoredBox) -> str:
        return box_key(self.kind, self.name, stored.box)

    def num_bytes(self, box: Box) -> int:
        return box.numel * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class RankFile:
    """Facts of one written file: enough for another process to commit it."""

    file: Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}(-[0-9a-z]{1,32})?\.safetensors$")]
    bytes: Count
    sha256: str
    tensors: tuple[StoredTensor, ...] = ()
    """What is in it; every box names this file."""


def fits(box: Box, shape: Sequence[int]) -> bool:
    """The box lies inside a tensor of this shape. An empty box may lie at its edge."""
    return len(box.size) == len(shape) and all(
        end <= size for end, size in zip(box.end, shape, strict=True)
    )
