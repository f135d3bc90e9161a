"""Token files: Megatron's ``.bin``/``.idx`` pair, read and written; also Weft's own store.

``NAME.bin`` is all tokens, one after the other. ``NAME.idx`` (little-endian) says how they divide:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the token type, see ``TOKEN_TYPES``
    uint64    number of sequences s
    uint64    length of the document index d
    int32[s]  tokens in each sequence
    int64[s]  byte in the .bin at which each sequence starts
    int64[d]  the sequence at which each document starts, closed by s
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.data.pieces import PieceCheck, PieceSums, TokenFileError, Tokens

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Token types by their code. Codes 6 and 7 are floating-point types, which no tokens have."""
_SIZE_LIMIT = 2**31 - 1


def token_type(vocab_size: int) -> type[np.integer]:
    """The smallest type that Megatron uses and that holds every id below ``vocab_size``."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def type_code(dtype: type[np.integer]) -> int:
    """Megatron's code of a token type."""
    return next(code for code, known in TOKEN_TYPES.items() if known is dtype)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """``prefix`` with ``suffix`` added, whatever dots it has."""
    return prefix.with_name(prefix.name + suffix)


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes ``prefix.bin`` and ``prefix.idx``. A context manager; the index is written on exit.

    Every ``add`` extends the sequence at hand and every ``end_document`` closes it, so a sequence
    is a document, as Megatron's own tools write it.
    """

    def __init__(self, prefix: Path, dtype: type[np.integer]) -> None:
        self.prefix = prefix
        self.num_tokens = 0
        self.num_documents = 0
        self._code = type_code(dtype)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(dtype)
        self._sizes: list[int] = []
        self._pending = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._sums = PieceSums()
        self._file = with_suffix(prefix, ".bin").open("wb")

    def add(self, tokens: npt.ArrayLike) -> None:
        """Append ``tokens [n]`` to the document at hand."""
        array = np.asarray(tokens)
        if not array.size:
            return
        assert self._limits.min <= array.min() and array.max() <= self._limits.max, (
            f"token {array.max()} does not fit {self._dtype}"
        )
        data = array.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._sums.add(data)
        self._pending += int(array.size)
        self.num_tokens += int(array.size)
        assert self._pending <= _SIZE_LIMIT, f"{self.prefix}: a document above 2**31 - 1 tokens"

    def end_document(self) -> None:
        """The document at hand is complete; one without tokens is not written."""
        if self._pending:
            self._sizes.append(self._pending)
            self._pending = 0
            self.num_documents += 1

    @property
    def digest(self) -> str:
        """Hash of the tokens written so far, the same on every machine."""
        return self._hash.hexdigest()

    @property
    def crc32(self) -> str:
        """Of each piece written so far: what ``PieceCheck`` takes."""
        return self._sums.text()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self.end_document()
            lengths = np.asarray(self._sizes, dtype="<i4")
            pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
            documents = np.arange(lengths.size + 1, dtype="<i8")
            header = _HEADER.pack(MAGIC, 1, self._code, lengths.size, documents.size)
            parts = (lengths.tobytes(), pointers.tobytes(), documents.tobytes())
            with_suffix(self.prefix, ".idx").write_bytes(b"".join((header, *parts)))


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """What an ``.idx`` says."""

    dtype: type[np.integer]
    sizes: npt.NDArray[np.int32]
    """``[sequences]`` tokens in each sequence."""
    documents: npt.NDArray[np.int64]
    """``[documents + 1]`` the sequence at which each document starts, closed by their number."""

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))

    def document_offsets(self) -> npt.NDArray[np.int64]:
        """``[documents + 1]`` the token at which each document starts, closed by their number."""
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        return ends[self.documents]


def read_index(prefix: Path) -> TokenIndex:
    """Read and check ``prefix.idx`` against itself and the size of ``prefix.bin``.

    Raises TokenFileError: either file is missing, cut short, or says what cannot be.
    """
    path = with_suffix(prefix, ".idx")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TokenFileError(path, "no such file") from None
    if len(data) < _HEADER.size:
        raise TokenFileError(path, f"{len(data)} bytes, too short for an index header")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack_from(data)
    if magic != MAGIC or version != 1:
        raise TokenFileError(path, f"starts with {magic!r}, version {version}: not an index")
    if code not in TOKEN_TYPES:
        raise TokenFileError(path, f"token type {code} is not one of {sorted(TOKEN_TYPES)}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if len(data) < expected:
        raise TokenFileError(
            path, f"{len(data)} bytes, but {num_sequences} sequences need {expected}: cut short"
        )
    at = _HEADER.size
    sizes = np.frombuffer(data, "<i4", num_sequences, at)
    pointers = np.frombuffer(data, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_documents, at + 12 * num_sequences)
    index = TokenIndex(TOKEN_TYPES[code], sizes, documents)
    _check_index(path, index, pointers)
    check_size(with_suffix(prefix, ".bin"), index.num_tokens, index.dtype)
    return index


def _check_index(path: Path, index: TokenIndex, pointers: npt.NDArray[np.int64]) -> None:
    sizes, documents = index.sizes, index.documents
    if sizes.size and sizes.min() < 0:
        raise TokenFileError(path, f"a sequence of {sizes.min()} tokens")
    lengths = sizes.astype(np.int64) * np.dtype(index.dtype).itemsize
    if not np.array_equal(pointers, np.cumsum(lengths) - lengths):
        raise TokenFileError(path, "the sequences do not follow each other in the .bin")
    ends_right = documents.size and documents[0] == 0 and documents[-1] == sizes.size
    if not ends_right or np.any(np.diff(documents) < 0):
        raise TokenFileError(path, "the document index does not run over the sequences in order")


def check_size(path: Path, num_tokens: int, dtype: type[np.integer]) -> None:
    """See that a ``.bin`` holds ``num_tokens`` tokens.

    Raises TokenFileError: it does not, or is missing.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise TokenFileError(path, "no such file") from None
    expected = num_tokens * np.dtype(dtype).itemsize
    if found != expected:
        raise TokenFileError(path, f"{found} bytes, but its index says {expected}")


def map_tokens(prefix: Path, num_tokens: int, dtype: type[np.integer]) -> Tokens:
    """The tokens of ``prefix.bin``, ``[num_tokens]``, memory-mapped and read-only.

    Raises TokenFileError: the file is missing or has another size.
    """
    path = with_suffix(prefix, ".bin")
    check_size(path, num_tokens, dtype)
    if not num_tokens:
        return np.zeros(0, dtype)
    mapped = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", shape=(num_tokens,))
    return mapped.view(np.ndarray)


class TokenStore:
    """Shards of one token type, read as one stream of ``num_tokens`` tokens."""

    def __init__(
        self, shards: Iterable[Tokens], checks: Sequence[PieceCheck] | None = None
    ) -> None:
        """``checks``: of each shard; what is read of it is compared first."""
        pairs = zip(shards, repeat(None) if checks is None else checks, strict=False)
        kept = [(shard, check) for shard, check in pairs if shard.size]
        self._shards = [shard for shard, _ in kept]
        self._checks = [check for _, check in kept]
        assert len({shard.dtype for shard in self._shards}) <= 1, "shards of several token types"
        sizes = [shard.size for shard in self._shards]
        self._offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens ``start .. stop - 1`` of the stream, copied, ``[stop - start]``.

        Raises TokenFileError: they are not those that were written.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"{start}:{stop} of {self.num_tokens}"
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        parts: list[Tokens] = []
        while start < stop:
            low, high = int(self._offsets[first]), min(int(self._offsets[first + 1]), stop)
            self._check(first, np.array([start - low]), high - start)
            parts.append(self._shards[first][start - low : high - low])
            start, first = high, first + 1
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
        """The ``length`` tokens from each of ``starts``: ``[n, length]``.

        Rows are gathered shard by shard from a strided view, one copy a row; only a row that
        crosses from one shard into the next is joined by hand.

        Raises TokenFileError: they are not those that were written.
        """
        result = np.empty((starts.size, length), np.int32)
        if not starts.size:
            return result
        assert starts.min() >= 0 and starts.max() + length <= self.num_tokens, (
            f"tokens {starts.min()}..{starts.max() + length} of {self.num_tokens}"
        )
        shards = np.searchsorted(self._offsets, starts, side="right") - 1
        whole = starts + length <= self._offsets[shards + 1]
        for shard in np.unique(shards[whole]).tolist():
            rows = np.flatnonzero((shards == shard) & whole)
            inside = starts[rows] - self._offsets[shard]
            self._check(shard, inside, length)
            view = np.lib.stride_tricks.sliding_window_view(self._shards[shard], length)
            result[rows] = view[inside]
        for row in np.flatnonzero(~whole).tolist():
            result[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return result

    def _check(self, shard: int, starts: npt.NDArray[np.int64], length: int) -> None:
        check = self._checks[shard]
        if check is not None:
            check.check(starts, length)
