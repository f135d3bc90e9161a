"""Documents to token shards: one job after the other, each batch of texts in the threads of the
tokenizer's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.data.documents import Part, Piece, parts, pieces
from weft.data.sources import Source
from weft.data.splitting import STREAM_BYTES, Split
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import TOKEN_TYPES, Tokens, TokenWriter

SIDES = ("train", "held_out")
_LARGEST_JOB_BYTES = 1 << 28
_WANTED_JOBS = 64
_BATCH_CHARS = 1 << 20
_BATCH_PIECES = 512


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """All that jobs have in common."""

    sources: tuple[Source, ...]
    splits: tuple[Split, ...]
    """One for each source."""
    tokenizer: Tokenizer
    type_code: int
    """Megatron's code of the token type."""
    folder: Path
    """Where the shards go."""


class Job(NamedTuple):
    """Parts of one source whose documents make one shard for each side of the split."""

    number: int
    source: int
    parts: list[Part]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One token file pair that was written."""

    name: str
    source: int
    side: str
    tokens: int
    documents: int
    num_bytes: int
    """Of text; of UTF-8."""
    digest: str


def make_jobs(sources: Sequence[Source]) -> list[Job]:
    """Divide the sources into jobs of like size, by their sizes alone.

    Raises:
        ConfigError: a file with rows cannot be opened.
    """
    total = sum(file.size for source in sources for file in source.files)
    wanted = 1 << max(total // _WANTED_JOBS, 1).bit_length()
    job_bytes = min(max(wanted, STREAM_BYTES), _LARGEST_JOB_BYTES)
    jobs: list[Job] = []
    for number, source in enumerate(sources):
        for batch in _gather(source, job_bytes):
            size = sum(num_bytes for _, num_bytes in batch)
            jobs.append(Job(len(jobs), number, [part for part, _ in batch], size))
    return jobs


def _gather(source: Source, job_bytes: int) -> Iterator[list[tuple[Part, int]]]:
    """Lists of (part, its bytes) of a source, each of about ``job_bytes`` in all."""
    batch: list[tuple[Part, int]] = []
    size = 0
    for number, file in enumerate(source.files):
        found = parts(source, number, job_bytes)
        whole = sum(part.stop - part.start for part in found)
        for part in found:
            part_bytes = max(file.size * (part.stop - part.start) // whole, 1)
            if batch and size + part_bytes > job_bytes:
                yield batch
                batch, size = [], 0
            batch.append((part, part_bytes))
            size += part_bytes
    if batch:
        yield batch


class _Side:
    """One shard in the making."""

    def __init__(self, encoding: Encoding, job: Job, side: str) -> None:
        self._end = [encoding.tokenizer.end_id]
        self._name = f"{job.source}-{side}-{job.number:05d}"
        self._source, self._side = job.source, side
        self._num_bytes = 0
        dtype = TOKEN_TYPES[encoding.type_code]
        self.writer = TokenWriter(encoding.folder / self._name, dtype)

    def add(self, piece: Piece, tokens: Tokens) -> None:
        self.writer.add(tokens)
        if isinstance(piece.content, str):
            self._num_bytes += len(piece.content.encode())
        ended = tokens.size and int(tokens[-1]) == self._end[0]
        if piece.ends and not ended:
            self.writer.add(self._end)
        if piece.ends:
            self.writer.end_document()

    def shard(self) -> Shard:
        return Shard(
            name=self._name,
            source=self._source,
            side=self._side,
            tokens=self.writer.num_tokens,
            documents=self.writer.num_documents,
            num_bytes=self._num_bytes,
            digest=self.writer.digest,
        )


class Encoded(NamedTuple):
    """What a job came to."""

    shards: list[Shard]
    lossy: list[str]
    """Names of files with bytes that are not UTF-8."""


def encode_job(encoding: Encoding, job: Job, progress: Callable[[int], None]) -> Encoded:
    """Tokenize the documents of a job into its shards; ``progress`` gets bytes as they are done.

    Raises:
        ConfigError: a document cannot be read or does not fit the tokenizer.
    """
    source = encoding.sources[job.source]
    lossy: set[str] = set()
    left = job.num_bytes
    with ExitStack() as stack:
        sides = [_Side(encoding, job, side) for side in SIDES]
        for side in sides:
            stack.enter_context(side.writer)
        for batch in _batches(source, job.parts, encoding.splits[job.source]):
            size = sum(len(piece.content) for _, piece in batch)
            for piece, tokens in _encode(source, batch, encoding.tokenizer):
                sides[piece.held_out].add(piece, tokens)
            lossy.update(name for name, piece in batch if piece.lossy)
            progress(min(size, left))
            left -= min(size, left)
    progress(left)
    return Encoded([side.shard() for side in sides], sorted(lossy))


Named = tuple[str, Piece]
"""The name of a file and a piece of it."""


def _batches(source: Source, wanted: Sequence[Part], split: Split) -> Iterator[list[Named]]:
    batch: list[Named] = []
    size = 0
    for part in wanted:
        name = source.files[part.file].name
        for piece in pieces(source, part, split):
            batch.append((name, piece))
            size += len(piece.content)
            if size >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _encode(
    source: Source, batch: Sequence[Named], tokenizer: Tokenizer
) -> Iterator[tuple[Piece, Tokens]]:
    """Every piece with its tokens ``[n]``, those that are text tokenized as one batch."""
    texts = [piece.content for _, piece in batch if isinstance(piece.content, str)]
    encoded = iter(tokenizer.encode_batch(texts))
    for _, piece in batch:
        if isinstance(piece.content, str):
            yield piece, next(encoded)
        else:
            _check_tokens(source, piece.content, tokenizer.vocab_size)
            yield piece, piece.content


def _check_tokens(source: Source, tokens: Tokens, vocab_size: int) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise source.request.error(
            f"tokens of data.tokenizer, 0 to {vocab_size - 1}",
            f"It holds {tokens.min()} to {tokens.max()}. Name the tokenizer.json that made them.",
        )
