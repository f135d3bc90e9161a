"""One rank's safetensors file, read box by box. Each chunk is compared with its checksum once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.checkpoint.entry import CHUNK_BYTES, CheckpointError, RankFile, StoredBox, StoredTensor
from weft.checkpoint.index import resolve_inside
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.shard import bytes_of
from weft.plan.box import Box


class RankFileReader:
    """An open rank file. Holds a memory map, and reads what is asked for.

    Raises CheckpointError for a file that is missing, of another size, or not safetensors.
    """

    def __init__(self, folder: Path, facts: RankFile) -> None:
        self._path = resolve_inside(folder, facts.file)
        check_size(self._path, facts)
        self._checked: set[tuple[str, int]] = set()
        """Chunks, by box, whose bytes are those that were written."""
        try:
            self._file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=self._path) from error

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def check(self, tensor: StoredTensor, stored: StoredBox) -> None:
        """Raise CheckpointError unless the file holds this box with this shape and dtype."""
        key = tensor.key(stored)
        try:
            view = self._file.get_slice(key)
        except SafetensorError as error:
            raise CheckpointError("is not in the file", file=self._path, tensor=key) from error
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if (shape, dtype) != (stored.box.size, tensor.dtype):
            problem = (
                f"the file holds {dtype} {shape}, the index says {tensor.dtype} {stored.box.size}"
            )
            raise CheckpointError(problem, file=self._path, tensor=key)

    def read(self, tensor: StoredTensor, stored: StoredBox, box: Box) -> Tensor:
        """Elements ``box`` (global indices) of a stored box: ``[*box.size]``, a view of the file.

        Every chunk that holds one of them is read once and compared with its checksum, before
        anything in it is given out: at most the stored box, and two chunks more than the elements
        where they lie together.
        """
        self.check(tensor, stored)
        key = tensor.key(stored)
        try:
            whole: Tensor = self._file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", file=self._path, tensor=key
            ) from error
        if box.numel == 0:
            return whole.new_empty(box.size)
        part = box.within(stored.box)
        self._check_elements(key, whole, stored, part)
        return whole[part.slices()]

    def _check_elements(self, key: str, whole: Tensor, stored: StoredBox, part: Box) -> None:
        data = bytes_of(whole)
        size = CHUNK_BYTES if len(stored.crc32) > 1 else len(data)
        lines = list(zip(part.offset, part.end, whole.stride(), strict=True))
        first = sum(low * stride for low, _, stride in lines) * whole.element_size()
        last = sum((high - 1) * stride for _, high, stride in lines) * whole.element_size()
        for chunk in range(first // size, last // size + 1):
            if (key, chunk) in self._checked:
                continue
            found = zlib.crc32(data[chunk * size : (chunk + 1) * size])
            if (found,) != stored.crc32[chunk : chunk + 1]:
                problem = "the elements are not those that were written (checksum differs)"
                raise CheckpointError(problem, file=self._path, tensor=key)
            self._checked.add((key, chunk))
