"""Sending one rank's file to storage far away, and reading back what arrived. Needs no PyTorch."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from weft.checkpoint.entry import CHUNK_BYTES, CheckpointError, Piece, RankFile, told
from weft.checkpoint.rank_file import header, in_file_order, stored
from weft.checkpoint.remote.path import RemotePath


def upload(
    path: RemotePath, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
) -> RankFile:
    """Send the boxes of a rank, and compare what the storage holds then with what was sent.

    Args:
        data: The elements of a piece in row-major order; asked for again where a connection is
            lost.

    Raises:
        CheckpointError: the storage refuses, is gone, or holds something else. Nothing is left.
    """
    ordered = in_file_order(pieces)
    sent = _Sent()

    def parts() -> Iterator[memoryview]:
        nonlocal sent
        sent = _Sent()
        return sent.parts(ordered, data)

    try:
        with told("written", path):
            path.write(parts)
        check_arrived(path, sent.num_bytes, sent.whole.hexdigest())
    except CheckpointError:
        _remove(path)
        raise
    tensors = tuple(stored(piece, path.name, sent.crc32[piece.key]) for piece in pieces)
    return RankFile(path.name, sent.num_bytes, sent.whole.hexdigest(), tensors)


def check_arrived(path: RemotePath, num_bytes: int, sha256: str) -> None:
    """Raise CheckpointError unless the storage gives back these bytes."""
    digest, size = hashlib.sha256(), 0
    with told("read", path):
        for chunk in path.chunks():
            digest.update(chunk)
            size += len(chunk)
    if (size, digest.hexdigest()) != (num_bytes, sha256):
        problem = f"the storage gives back other bytes than were sent ({size} of {num_bytes})"
        raise CheckpointError(problem, file=path)


class _Sent:
    """What was sent, as far as it was."""

    def __init__(self) -> None:
        self.whole = hashlib.sha256()
        self.crc32: dict[str, list[int]] = {}
        self.num_bytes = 0

    def parts(
        self, ordered: Sequence[Piece], data: Callable[[Piece], memoryview]
    ) -> Iterator[memoryview]:
        """The file from its beginning."""
        yield self._hashed(memoryview(header(ordered)))
        for piece in ordered:
            elements = data(piece)
            of_piece = self.crc32.setdefault(piece.key, [])
            for start in range(0, len(elements), CHUNK_BYTES):
                chunk = elements[start : start + CHUNK_BYTES]
                of_piece.append(zlib.crc32(chunk))
                yield self._hashed(chunk)

    def _hashed(self, data: memoryview) -> memoryview:
        self.whole.update(data)
        self.num_bytes += len(data)
        return data


def _remove(path: RemotePath) -> None:
    with suppress(OSError):  # the next save of the run clears it
        path.unlink()
