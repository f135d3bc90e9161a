"""Documents out of sources: a stream of pieces, each small, each on one side of the split.

A file can be read from any place to any other, so that several processes share a large one. The
pieces and the side each is on depend on the file and the split alone, not on who reads what.

Which text is held out for evaluation is decided by a hash, the same on every machine.
A document is held out when the hash of its identity, as a fraction of 2**64, is below the part
asked for. The identity of a file is its path inside the source, so editing it does not move it;
that of a row (JSONL, Parquet, token files) is its content, so neither its place nor a copy of it
matters: duplicates never end up on both sides. Neither depends on the seed: all runs share one
held-out set.

A source of fewer than 20 documents is cut into blocks first, and each block is hashed by its
document and number: that is how a single text file gets a held-out part. Consecutive blocks on
one side stay one document.

Where chance leaves a side empty, the limit moves just enough to give it one document (or block).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from weft.data.hashing import identity_hash
from weft.data.pieces import Tokens
from weft.data.rows import TOKEN_BYTES, rows, stretches
from weft.data.sources import Source, SourceFile, name_bytes
from weft.data.tables import decode_text
from weft.data.unpack import open_text, text_bytes

STREAM_BYTES = 1 << 20
"""Whole documents are read and tokenized in pieces of this size."""
BLOCK_BYTES = 1 << 16
"""Largest block of a source with few documents; a small source has smaller ones."""
SMALLEST_BLOCK_BYTES = 1 << 9
FEW_DOCUMENTS = 20


@dataclass(frozen=True)
class Split:
    """How the documents of one source divide into a training and a held-out part."""

    limit: int
    """Identities below it, out of 2**64, are held out; 0 holds out nothing."""
    by_block: bool
    """Blocks are hashed one by one, not documents as a whole."""
    unit: int
    """Bytes of a document that are read, and decided on, as one."""

    def held_out(self, identity: int, block: int) -> bool:
        """Whether a block of the document with this identity is held out."""
        return (_block_identity(identity, block) if self.by_block else identity) < self.limit


def _block_identity(identity: int, block: int) -> int:
    return identity_hash(identity.to_bytes(8, "little"), block.to_bytes(8, "little"))


def choose_limit(identities: Iterable[int], held_out: float, enough: int) -> int | None:
    """The limit below which identities are held out, so that neither side is empty.

    Reads no further than it must: until ``enough`` identities were seen and both sides have one.
    The result depends on the set of identities, not on their order.

    Returns:
        None: fewer than ``enough`` identities, or all of them are equal.
    """
    assert 0 < held_out < 1, f"held out {held_out}"
    limit = int(held_out * 2.0**64)
    low, high, seen = 2**64, -1, 0
    for identity in identities:
        low, high, seen = min(low, identity), max(high, identity), seen + 1
        if seen >= enough and low < limit <= high:
            return limit
    if seen < enough or low >= high:
        return None
    return low + 1 if limit <= low else high


def block_bytes(total_bytes: int) -> int:
    """Block size for a source of few documents: a power of two, so that it rarely changes."""
    wanted = max(total_bytes // FEW_DOCUMENTS, 1)
    return min(max(1 << (wanted.bit_length() - 1), SMALLEST_BLOCK_BYTES), BLOCK_BYTES)


class Piece(NamedTuple):
    """A part of a document that is tokenized in one go."""

    content: str | Tokens
    """Text, or tokens ``[n]`` of a source that has tokens already."""
    held_out: bool
    ends: bool
    """The document ends here, on this side of the split."""
    lossy: bool
    """Bytes that are not UTF-8 were replaced by U+FFFD."""


class Part(NamedTuple):
    """A stretch of one file. Text and JSONL: bytes; otherwise row numbers."""

    file: int
    """Number of the file in its source."""
    start: int
    stop: int


def parts(source: Source, number: int, part_bytes: int) -> list[Part]:
    """Divide file ``number`` into parts of about ``part_bytes``, a multiple of ``STREAM_BYTES``.

    Raises ConfigError: the file cannot be opened.
    """
    assert part_bytes % STREAM_BYTES == 0, f"parts of {part_bytes} bytes"
    file = source.files[number]
    if file.kind == "text" and file.packing:
        return [Part(number, 0, file.size)]
    if file.kind == "text":
        starts = range(0, file.size, part_bytes)
        return [Part(number, low, min(low + part_bytes, file.size)) for low in starts]
    return [Part(number, *found) for found in stretches(source.request, file, part_bytes)]


def documents(source: Source) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of every document of a source; plain text is not opened for it."""
    for file in source.files:
        if file.kind == "text":
            yield _file_identity(file), text_bytes(source.request, file)
    for file in source.files:
        if file.kind == "text":
            continue
        for start, stop in stretches(source.request, file, STREAM_BYTES):
            for row in rows(source.request, file, start, stop):
                yield row.identity(), row.num_bytes


def _file_identity(file: SourceFile) -> int:
    return identity_hash(b"file", name_bytes(file.name))


def choose_split(source: Source, held_out: float) -> Split:
    """How to divide a source; this file begins with the rule.

    Raises ConfigError: the source is too small, or too uniform, to hold out anything.
    """
    if held_out == 0:
        return Split(limit=0, by_block=False, unit=STREAM_BYTES)
    identities = (identity for identity, _ in documents(source))
    limit = choose_limit(identities, held_out, enough=FEW_DOCUMENTS)
    if limit is not None:
        return Split(limit=limit, by_block=False, unit=STREAM_BYTES)
    unit = block_bytes(sum(size for _, size in documents(source)))
    blocks = (
        _block_identity(identity, block)
        for identity, size in documents(source)
        for block in range(-(-size // unit))
    )
    limit = choose_limit(blocks, held_out, enough=2)
    if limit is None:
        raise source.request.error(
            f"a source of which data.held_out = {held_out} can be kept apart",
            f"It has less than {2 * unit} bytes of unlike text. Give more, or set data.held_out=0.",
        )
    return Split(limit=limit, by_block=True, unit=unit)


def pieces(source: Source, part: Part, split: Split) -> Iterator[Piece]:
    """The pieces of a part of a file, in order.

    Raises ConfigError: a row cannot be read; names the file and the line.
    """
    file = source.files[part.file]
    if file.kind == "text":
        with open_text(source.request, file) as (stream, size):
            stop = size if file.packing else part.stop
            numbers = range(part.start // split.unit, -(-stop // split.unit))
            blocks = split_blocks(stream, size, split.unit, numbers)
            yield from _text_pieces(blocks, _file_identity(file), size, split)
        return
    for row in rows(source.request, file, part.start, part.stop):
        if isinstance(row.content, str):
            data = row.content.encode()
            numbers = range(-(-len(data) // split.unit))
            blocks = split_blocks(io.BytesIO(data), len(data), split.unit, numbers)
            for piece in _text_pieces(blocks, row.identity(), len(data), split):
                yield piece._replace(lossy=row.lossy)
        else:
            yield from _token_pieces(row.content, row.identity(), split)


def _text_pieces(
    blocks: Iterator[tuple[int, bytes]], identity: int, size: int, split: Split
) -> Iterator[Piece]:
    count = -(-size // split.unit)
    for number, data in blocks:
        side, ends = _side(identity, number, count, split)
        text, lossy = decode_text(data)
        # The last block is empty when the line before it runs to the end of the file.
        if data or (number and split.held_out(identity, number - 1) == side):
            yield Piece(text, side, ends, lossy)


def _token_pieces(tokens: Tokens, identity: int, split: Split) -> Iterator[Piece]:
    unit = split.unit // TOKEN_BYTES
    count = -(-int(tokens.size) // unit)
    for number in range(count):
        side, ends = _side(identity, number, count, split)
        yield Piece(tokens[number * unit : (number + 1) * unit], side, ends, lossy=False)


def _side(identity: int, number: int, count: int, split: Split) -> tuple[bool, bool]:
    """(held out, the document ends on this side) of block ``number`` of ``count``."""
    side = split.held_out(identity, number)
    return side, number + 1 == count or split.held_out(identity, number + 1) != side


def split_blocks(
    stream: BinaryIO, size: int, unit: int, numbers: range
) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of consecutive blocks of a stream of ``size`` bytes.

    Block k runs from the first line that starts at or after byte k * unit to the first one that
    starts at or after (k + 1) * unit. A line longer than a unit is cut between two characters.
    """
    at = _cut(stream, size, unit, numbers.start)
    for number in numbers:
        end = _cut(stream, size, unit, number + 1)
        stream.seek(at)
        yield number, stream.read(end - at)
        at = end


def _cut(stream: BinaryIO, size: int, unit: int, number: int) -> int:
    """The byte at which block ``number`` starts."""
    wanted = number * unit
    if wanted == 0 or wanted >= size:
        return min(wanted, size)
    stream.seek(wanted - 1)
    window = stream.read(min(unit, size - wanted + 1))
    newline = window.find(b"\n")
    if newline >= 0:
        return wanted + newline
    inside = 1
    while inside < min(4, len(window)) and window[inside] & 0xC0 == 0x80:
        inside += 1
    return wanted - 1 + inside
