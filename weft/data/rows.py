"""Documents that are not files of their own: rows of JSONL, Parquet, token files, and the manual.

A stretch of rows is (start, stop): bytes of a JSONL file, whose rows are those that start inside,
and row numbers of everything else.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.config.errors import ConfigError
from weft.data.hashing import Int64Array, identity_hash
from weft.data.pieces import TokenFileError, Tokens
from weft.data.sources import Request, SourceFile
from weft.data.tokens import map_tokens, read_index, with_suffix

TOKEN_BYTES = 2
"""Bytes of text that a token of a token file counts for, where sizes are compared."""
_PARQUET_ROWS = 256
_SEARCHED = 1 << 20
_TEXT_TYPES = ("string", "large_string", "dictionary<values=string")


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
    if file.kind == "jsonl":
        starts = range(0, file.size, stretch_bytes)
        return [(low, min(low + stretch_bytes, file.size)) for low in starts]
    if file.kind == "parquet":
        ends = _group_ends(_open_parquet(request, file))
    else:
        count = len(_topics()) if file.kind == "topics" else _read_tokens(request, file)[0].size - 1
        ends = list(range(1, count + 1))
    if not ends:
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
    elif file.kind == "parquet":
        found = _parquet_rows(request, file, start, stop)
    elif file.kind == "topics":
        found = (Row(text, lossy=False) for text in _topics()[start:stop])
    else:
        found = _token_rows(request, file, start, stop)
    return (row for row in found if len(row.content))


def decode_text(data: bytes) -> tuple[str, bool]:
    """Text of UTF-8 bytes, and whether some had to be replaced by U+FFFD."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


def _topics() -> Sequence[str]:
    """Python's reference manual, as ``help()`` shows it, by topic."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _jsonl_rows(request: Request, file: SourceFile, start: int, stop: int) -> Iterator[Row]:
    with Path(file.path).open("rb") as stream:
        at = start
        if at:
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        while at < stop:
            line = stream.readline()
            if line.strip():
                yield _jsonl_row(request, file, at, line)
            at += max(len(line), 1)


def _jsonl_row(request: Request, file: SourceFile, at: int, line: bytes) -> Row:
    text, lossy = decode_text(line)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg}, column {error.colno}"
        hint = f"{file.path}:{_line_number(file, at)}: {problem}. Correct or delete that line."
        raise request.error("one JSON object a line", hint) from None
    content = row.get(request.field) if isinstance(row, dict) else None
    if not isinstance(content, str):
        raise _no_text(request, f"{file.path}:{_line_number(file, at)}", row)
    # JSON can spell half of a surrogate pair, which is no character.
    whole = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Row(whole, lossy or whole != content)


def _no_text(request: Request, where: str, row: object) -> ConfigError:
    if not isinstance(row, dict):
        hint = f"{where} is a JSON {type(row).__name__}, not an object."
        return request.error("one JSON object a line", hint)
    if request.field in row:
        hint = f"{where} has {type(row[request.field]).__name__} there."
    else:
        hint = f"{where} has: {', '.join(sorted(map(str, row))[:8]) or 'nothing'}."
    expected = "a field that holds text in every row"
    return ConfigError(request.key_of("field"), request.field, expected, hint)


def _line_number(file: SourceFile, at: int) -> int:
    """Number, from 1, of the line that starts at byte ``at``."""
    count = 1
    with Path(file.path).open("rb") as stream:
        while at > 0:
            data = stream.read(min(at, 1 << 20))
            assert data, f"{file.path} became shorter while it was read"
            count += data.count(b"\n")
            at -= len(data)
    return count


def _open_parquet(request: Request, file: SourceFile) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` that has the wanted column."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        hint = "Parquet needs pyarrow: pip install 'weft[parquet]'."
        raise request.error("a format that can be read here", hint) from None
    try:
        opened = parquet.ParquetFile(file.path)
    except (import_module("pyarrow").ArrowException, OSError) as error:
        raise request.error("Parquet files", f"{file.path}: {error}") from None
    field, schema = request.field, opened.schema_arrow
    if field not in schema.names:
        raise _no_text(request, file.path, dict.fromkeys(schema.names))
    kind = str(schema.field(field).type)
    if not kind.startswith(_TEXT_TYPES):
        hint = f"{file.path} has {kind} there."
        raise ConfigError(request.key_of("field"), field, "a column of strings", hint)
    return opened


def _group_ends(opened: Any) -> list[int]:
    """The row after the last one of each row group, which is what Parquet reads as a whole."""
    groups = map(opened.metadata.row_group, range(opened.num_row_groups))
    return list(accumulate(group.num_rows for group in groups))


def _parquet_rows(request: Request, file: SourceFile, start: int, stop: int) -> Iterator[Row]:
    opened = _open_parquet(request, file)
    ends = _group_ends(opened)
    groups = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
    at = ends[groups.start - 1] if groups.start else 0
    for batch in opened.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[request.field]):
        texts = batch.column(0).to_pylist()
        for text in texts[max(start - at, 0) : max(stop - at, 0)]:
            yield Row(text or "", lossy=False)
        at += len(texts)


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
