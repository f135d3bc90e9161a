"""Documents that are not files of their own: rows of JSONL, tables, token files, and the manual.

A stretch of rows is (start, stop): bytes of a JSONL file, whose rows are those that start inside,
and row numbers of everything else. What can be read from its start only is one stretch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.config.errors import ConfigError
from weft.data.hashing import Int64Array, identity_hash
from weft.data.pieces import TokenFileError, Tokens
from weft.data.sources import Request, SourceFile
from weft.data.tables import BOM, COLUMNS, DELIMITERS, decode_text, delimited, no_text
from weft.data.tokens import map_tokens, read_index, with_suffix
from weft.data.unpack import is_cut, open_bytes

TOKEN_BYTES = 2
"""Bytes of text that a token of a token file counts for, where sizes are compared."""
_SEARCHED = 1 << 20


class Row(NamedTuple):
    """A document that is not a file of its own."""

    content: str | Tokens
    """Text, or tokens ``[n]``."""
    lossy: bool
    """Something in it was not text, and was replaced by U+FFFD."""

    def identity(self) -> int:
        """Hash of the content."""
        if isinstance(self.content, str):
            return identity_hash(b"row", self.content.encode())
        return identity_hash(b"tokens", self.content.astype("<i8").tobytes())

    @property
    def num_bytes(self) -> int:
        if isinstance(self.content, str):
            return len(self.content.encode())
        return int(self.content.size) * TOKEN_BYTES


def stretches(request: Request, file: SourceFile, stretch_bytes: int) -> list[tuple[int, int]]:
    """Divide what is to be read of a file into stretches of about ``stretch_bytes``.

    Raises ConfigError: the file cannot be opened.
    """
    if file.packing or file.kind in DELIMITERS:  # can be read from the start only
        return [(0, file.size)]
    if file.kind == "jsonl":
        starts = range(0, file.size, stretch_bytes)
        return [(low, min(low + stretch_bytes, file.size)) for low in starts]
    if file.kind in COLUMNS:
        ends = COLUMNS[file.kind](request, file).ends
    else:
        count = len(_topics()) if file.kind == "topics" else _read_tokens(request, file)[0].size - 1
        ends = list(range(1, count + 1))
    if not any(ends):  # an empty table has a batch of no rows
        return []
    total = max(ends[-1] * file.size // file.full_size, 1)
    per_stretch = max(ends[-1] * stretch_bytes // file.full_size, 1)
    result, low = [], 0
    for end in (*(end for end in ends if end < total), total):
        if end - low >= per_stretch or end == total:
            result.append((low, end))
            low = end
    return result


def rows(request: Request, file: SourceFile, start: int, stop: int) -> Iterator[Row]:
    """The documents of a stretch, those without any text left out.

    Raises ConfigError: a row cannot be read; names the file and the line.
    """
    if file.kind == "jsonl":
        found = _jsonl_rows(request, file, start, stop)
    elif file.kind in DELIMITERS:
        found = (Row(*each) for each in delimited(request, file))
    elif file.kind in COLUMNS:
        texts = COLUMNS[file.kind](request, file).texts(start, stop)
        found = (Row(text, lossy=False) for text in texts)
    elif file.kind == "topics":
        found = (Row(text, lossy=False) for text in _topics()[start:stop])
    else:
        found = _token_rows(request, file, start, stop)
    return (row for row in found if len(row.content))


def refuse_no_field(request: Request, files: Sequence[SourceFile]) -> None:
    """Read the first row of the first file that has keys or columns.

    Raises ConfigError: as ``rows``.
    """
    for file in files:
        if file.kind == "jsonl" or file.kind in DELIMITERS or file.kind in COLUMNS:
            next(rows(request, file, 0, 1), None)
            return


def _topics() -> Sequence[str]:
    """Python's reference manual, as ``help()`` shows it, by topic."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _jsonl_rows(request: Request, file: SourceFile, start: int, stop: int) -> Iterator[Row]:
    with open_bytes(request, file) as stream:
        at = start
        if at:
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        while at < stop or file.packing:
            line = stream.readline()
            if not line or (is_cut(file) and not line.endswith(b"\n")):
                return
            if line.strip():
                yield _jsonl_row(request, file, at, line)
            at += len(line)


def _jsonl_row(request: Request, file: SourceFile, at: int, line: bytes) -> Row:
    text, lossy = decode_text(line)
    try:
        row = json.loads(text if at else text.removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg}, column {error.colno}"
        where = f"{file.path}:{_line_number(request, file, at)}"
        hint = f"{where}: {problem}. Correct or delete that line."
        raise request.error("one JSON object a line", hint) from None
    content = row.get(request.field) if isinstance(row, dict) else None
    if not isinstance(content, str):
        raise no_text(request, f"{file.path}:{_line_number(request, file, at)}", row)
    # JSON can spell half of a surrogate pair, which is no character.
    whole = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Row(whole, lossy or whole != content)


def _line_number(request: Request, file: SourceFile, at: int) -> int:
    """Number, from 1, of the line that starts at byte ``at``."""
    count = 1
    with open_bytes(request, file) as stream:
        while at > 0:
            data = stream.read(min(at, 1 << 20))
            assert data, f"{file.path} became shorter while it was read"
            count += data.count(b"\n")
            at -= len(data)
    return count


def _read_tokens(request: Request, file: SourceFile) -> tuple[Int64Array, Tokens]:
    """(token at which each document starts ``[documents + 1]``, all tokens)."""
    prefix = Path(file.path)
    try:
        index = read_index(prefix)
        return index.document_offsets(), map_tokens(prefix, index.num_tokens, index.dtype)
    except TokenFileError as error:
        raise request.error("a whole .bin/.idx pair", str(error)) from None


def _token_rows(request: Request, file: SourceFile, start: int, stop: int) -> Iterator[Row]:
    offsets, tokens = _read_tokens(request, file)
    for number in range(start, stop):
        yield Row(tokens[offsets[number] : offsets[number + 1]], lossy=False)


def refuse_token(request: Request, file: SourceFile, highest: int) -> ConfigError:
    """A complaint about the first id of a token file that is not one of 0 to ``highest``."""
    _, tokens = _read_tokens(request, file)
    for start in range(0, tokens.size, _SEARCHED):
        part = tokens[start : start + _SEARCHED]
        outside = np.flatnonzero((part < 0) | (part > highest))
        if outside.size:
            place = start + int(outside[0])
            where = f"{with_suffix(Path(file.path), '.bin')}, byte {place * part.itemsize}"
            hint = f"{where}, has {tokens[place]}. Name the tokenizer.json that made them."
            return request.error(f"tokens of data.tokenizer, 0 to {highest}", hint)
    raise AssertionError(f"{file.path} changed while it was read")
