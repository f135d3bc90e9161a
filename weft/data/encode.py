"""Documents to token shards: one job after the other, each batch of texts in the threads of the
tokenizer's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from weft.config.values import Whole
from weft.data.documents import STREAM_BYTES, Part, Piece, Split, parts, pieces
from weft.data.pieces import Tokens
from weft.data.rows import refuse_token
from weft.data.sources import Source
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import TokenWriter, token_type

SIDES = ("train", "held_out")
_LARGEST_JOB_BYTES = 1 << 28
_WANTED_JOBS = 64
_BATCH_CHARS = 1 << 20
_BATCH_PIECES = 512


@dataclass(frozen=True, kw_only=True)
class Job:
    """Parts of one source whose documents make one shard for each side of the split."""

    number: int
    source_number: int
    source: Source
    split: Split
    parts: list[Part]
    num_bytes: int

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """(name of its file, piece) of every document.

        Raises ConfigError: a row cannot be read; names the file and the line.
        """
        for part in self.parts:
            name = self.source.files[part.file].name
            for piece in pieces(self.source, part, self.split):
                yield name, piece


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One token file pair that was written."""

    name: str
    source: Whole
    side: str
    tokens: Whole
    documents: Whole
    num_bytes: Whole
    """Of text; of UTF-8."""
    digest: str
    crc32: str
    """Of each piece of the tokens."""


def make_jobs(sources: Sequence[Source], splits: Sequence[Split]) -> list[Job]:
    """Divide the sources into jobs of like size, by their sizes alone.

    Raises ConfigError: a file with rows cannot be opened.
    """
    total = sum(file.size for source in sources for file in source.files)
    wanted = 1 << max(total // _WANTED_JOBS, 1).bit_length()
    job_bytes = min(max(wanted, STREAM_BYTES), _LARGEST_JOB_BYTES)
    jobs: list[Job] = []
    for number, (source, split) in enumerate(zip(sources, splits, strict=True)):
        for batch, size in _gather(source, job_bytes):
            job = Job(
                number=len(jobs),
                source_number=number,
                source=source,
                split=split,
                parts=batch,
                num_bytes=size,
            )
            jobs.append(job)
    return jobs


def _gather(source: Source, job_bytes: int) -> Iterator[tuple[list[Part], int]]:
    """Lists of parts of a source, and the bytes of each list, about ``job_bytes``."""
    batch: list[Part] = []
    size = 0
    for number, file in enumerate(source.files):
        found = parts(source, number, job_bytes)
        whole = sum(part.stop - part.start for part in found)
        for part in found:
            part_bytes = max(file.size * (part.stop - part.start) // whole, 1)
            if batch and size + part_bytes > job_bytes:
                yield batch, size
                batch, size = [], 0
            batch.append(part)
            size += part_bytes
    if batch:
        yield batch, size


def encode_job(
    job: Job, tokenizer: Tokenizer, folder: Path, progress: Callable[[int], None]
) -> tuple[list[Shard], set[str]]:
    """Tokenize the documents of a job into its shards; ``progress`` gets bytes as they are done.

    Returns:
        The shards, and the names of files with bytes that are not UTF-8.

    Raises ConfigError: a document cannot be read or does not fit the tokenizer.
    """
    names = [f"{job.source_number}-{side}-{job.number:05d}" for side in SIDES]
    dtype = token_type(tokenizer.vocab_size)
    text_bytes = [0, 0]
    lossy: set[str] = set()
    left = job.num_bytes
    with ExitStack() as stack:
        writers = [stack.enter_context(TokenWriter(folder / name, dtype)) for name in names]
        for batch in _batches(job):
            for piece, tokens in _encode(job.source, batch, tokenizer):
                writer = writers[piece.held_out]
                text_bytes[piece.held_out] += _write(writer, piece, tokens, tokenizer.end_id)
            lossy.update(name for name, piece in batch if piece.lossy)
            done = min(sum(len(piece.content) for _, piece in batch), left)
            progress(done)
            left -= done
    progress(left)
    shards = [
        Shard(
            name=name,
            source=job.source_number,
            side=side,
            tokens=writer.num_tokens,
            documents=writer.num_documents,
            num_bytes=num_bytes,
            digest=writer.digest,
            crc32=writer.crc32,
        )
        for name, side, writer, num_bytes in zip(names, SIDES, writers, text_bytes, strict=True)
    ]
    return shards, lossy


def _write(writer: TokenWriter, piece: Piece, tokens: Tokens, end_id: int) -> int:
    """Write a piece; gives its bytes of text."""
    writer.add(tokens)
    if piece.ends:
        if not tokens.size or int(tokens[-1]) != end_id:
            writer.add([end_id])
        writer.end_document()
    return len(piece.content.encode()) if isinstance(piece.content, str) else 0


def _batches(job: Job) -> Iterator[list[tuple[str, Piece]]]:
    batch: list[tuple[str, Piece]] = []
    size = 0
    for named in job.pieces():
        batch.append(named)
        size += len(named[1].content)
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    source: Source, batch: Sequence[tuple[str, Piece]], tokenizer: Tokenizer
) -> Iterator[tuple[Piece, Tokens]]:
    """Every piece with its tokens ``[n]``, those that are text tokenized as one batch."""
    texts = [piece.content for _, piece in batch if isinstance(piece.content, str)]
    encoded = iter(tokenizer.encode_batch(texts))
    highest = tokenizer.vocab_size - 1
    for name, piece in batch:
        if isinstance(piece.content, str):
            yield piece, next(encoded)
            continue
        tokens = piece.content
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= highest:
            file = next(file for file in source.files if file.name == name)
            raise refuse_token(source.request, file, highest)
        yield piece, tokens
