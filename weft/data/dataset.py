"""Samples out of token stores: fixed windows over the concatenated documents of a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch, Positions, as_positions
from weft.data.order import TrainOrder
from weft.data.pieces import PieceCheck
from weft.data.tokens import TOKEN_TYPES, TokenStore, map_tokens, read_index, with_suffix


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """Where a token store lies: what another process needs to open it."""

    folder: str
    shards: tuple[tuple[str, int], ...]
    """(name, tokens) of every shard, in order."""
    crc32: tuple[str, ...]
    """Checksums of every shard's pieces, as ``TokenWriter.crc32`` gives them."""
    type_code: int
    """Megatron's code of the token type."""

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.shards)

    def num_samples(self, seq_len: int) -> int:
        """Windows of ``seq_len`` tokens and one target more; the rest of the stream is left."""
        return max(self.num_tokens - 1, 0) // seq_len

    def open(self) -> TokenStore:
        """Map every shard. What is read of one is compared with its checksums first.

        Raises TokenFileError: a shard is missing or has another size.
        """
        dtype = TOKEN_TYPES[self.type_code]
        shards, checks = [], []
        for (name, tokens), crc32 in zip(self.shards, self.crc32, strict=True):
            prefix = Path(self.folder) / name
            shards.append(map_tokens(prefix, tokens, dtype))
            checks.append(PieceCheck(with_suffix(prefix, ".bin"), shards[-1], crc32))
        return TokenStore(shards, checks)

    def document_starts(self) -> npt.NDArray[np.int64]:
        """The tokens of the stream at which documents start, ``[documents]``.

        Raises TokenFileError: an index is missing or damaged.
        """
        starts, before = [np.zeros(0, np.int64)], 0
        for name, tokens in self.shards:
            starts.append(before + read_index(Path(self.folder) / name).document_offsets()[:-1])
            before += tokens
        return np.concatenate(starts)


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """How samples are cut from one or several stores, and in which order they come."""

    stores: tuple[StoreSpec, ...]
    seq_len: int
    end_id: int
    """The end-of-document token."""
    mask_documents: bool
    """Number the documents inside each sample, and do not predict across their borders."""
    order: TrainOrder | None
    """None: all samples of the first store in sequence, then of the next; no position beyond."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return sum(store.num_samples(self.seq_len) for store in self.stores)

    def open(self) -> PackedDataset:
        """Open the stores here."""
        return PackedDataset(self)


class PackedDataset:
    """Windows of ``seq_len`` tokens. Sample i of a store is its tokens i*seq_len .. (i+1)*seq_len.

    The last token of the window is only a target; it is the first token of the next sample, so
    that every token of the stream but its first is predicted exactly once an epoch.
    """

    def __init__(self, spec: PackedSpec) -> None:
        self.spec = spec
        self._stores = [store.open() for store in spec.stores]
        counts = [store.num_samples(spec.seq_len) for store in spec.stores]
        self._ends = np.cumsum(counts)

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return int(self._ends[-1])

    def batch(self, positions: Positions) -> Batch:
        """The samples at ``positions``: below ``num_samples`` without an order, else any."""
        samples = as_positions(positions)
        source, place = self._locate(samples)
        seq_len = self.spec.seq_len
        stream = np.empty((samples.size, seq_len + 1), np.int32)  # [n, seq + 1]
        for number in np.unique(source).tolist():
            rows = np.flatnonzero(source == number)
            stream[rows] = self._stores[number].windows(place[rows] * seq_len, seq_len + 1)
        tokens = stream[:, :-1].copy()
        weights = np.ones(tokens.shape, np.float32)
        segments = None
        if self.spec.mask_documents:
            ends = tokens == self.spec.end_id
            weights[ends] = 0
            segments = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        return Batch(tokens, stream[:, 1:].copy(), weights, segments, samples)

    def pairs(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Pairs of tokens of a document, each with itself too, of the samples at ``positions``:
        from the index of documents alone."""
        each = (length * (length + 1) // 2 for length in self.lengths(positions))
        return np.array([pairs.sum() for pairs in each], np.int64)

    def lengths(self, positions: Positions) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of each document of each of these samples, likewise."""
        seq_len = self.spec.seq_len
        source, place = self._locate(as_positions(positions))
        for store, start in zip(source.tolist(), place * seq_len, strict=True):
            begins = self._document_starts[store]
            low, high = np.searchsorted(begins, (start + 1, start + seq_len))
            yield np.diff(begins[low:high], prepend=start, append=start + seq_len)

    @cached_property
    def _document_starts(self) -> list[npt.NDArray[np.int64]]:
        return [store.document_starts() for store in self.spec.stores]

    def _locate(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(store number, sample number in it) of every position, both ``[n]``."""
        if self.spec.order is not None:
            return self.spec.order.locate(samples)
        assert not samples.size or samples.max() < self.num_samples, (
            f"position {samples.max()} of {self.num_samples} held-out samples"
        )
        source = np.searchsorted(self._ends, samples, side="right").astype(np.int64)
        before = np.concatenate([[0], self._ends[:-1]]).astype(np.int64)
        return source, samples - before[source]
