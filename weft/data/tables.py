"""Documents in one column of a table: CSV and TSV with a header, Parquet, Arrow."""

from __future__ import annotations

import csv
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from weft.config.errors import ConfigError
from weft.data.sources import Request, SourceFile
from weft.data.unpack import is_cut, open_bytes

DELIMITERS = {"csv": ",", "tsv": "\t"}
"""What stands between two columns, by the kind of file."""
_ROWS = 256
_TEXT_TYPES = ("string", "large_string", "dictionary<values=string")
BOM = "\ufeff"

_T = TypeVar("_T")


def decode_text(data: bytes) -> tuple[str, bool]:
    """Text of UTF-8 bytes, and whether some had to be replaced by U+FFFD."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


def no_text(request: Request, where: str, row: object) -> ConfigError:
    """A complaint that a row or a table has no text where the source says it has."""
    if not isinstance(row, dict):
        hint = f"{where} is a JSON {type(row).__name__}, not an object."
        return request.error("one JSON object a line", hint)
    if request.field in row:
        hint = f"{where} has {type(row[request.field]).__name__} there."
    else:
        hint = f"{where} has: {', '.join(sorted(map(str, row))[:8]) or 'nothing'}."
    return request.no_field("a field that holds text in every row", hint)


class _Lines:
    """The lines of a file as text, counted: what ``csv`` reads rows from."""

    def __init__(self, request: Request, file: SourceFile) -> None:
        self._request, self._file = request, file
        self.bytes = 0
        self.lossy = False
        """Of the lines since it was last set."""

    def __iter__(self) -> Iterator[str]:
        with open_bytes(self._request, self._file) as stream:
            for line in stream:
                text, lossy = decode_text(line)
                self.lossy |= lossy
                yield text if self.bytes else text.removeprefix(BOM)
                self.bytes += len(line)


def delimited(request: Request, file: SourceFile) -> Iterator[tuple[str, bool]]:
    """(text, whether something in it was replaced) of every row; blank lines left out.

    Raises ConfigError: no header with the wanted column, or a row of another width.
    """
    csv.field_size_limit(sys.maxsize)  # a document may be long
    lines = _Lines(request, file)
    reader = csv.reader(lines, delimiter=DELIMITERS[file.kind], strict=not is_cut(file))
    try:
        header = next(reader, [])
        if request.field not in header:
            raise no_text(request, file.path, dict.fromkeys(header))
        _refuse_two(request, file, header)
        column = header.index(request.field)
        found = _until_the_limit(reader, lines, file)
        for row, line, lossy in _without_last(found) if is_cut(file) else found:
            if len(row) != len(header):
                problem = f"{len(row)} columns, and the header has {len(header)}"
                raise _bad_row(request, file, line, problem)
            yield row[column], lossy
    except csv.Error as error:
        raise _bad_row(request, file, reader.line_num, str(error)) from None


def _until_the_limit(
    reader: Any, lines: _Lines, file: SourceFile
) -> Iterator[tuple[list[str], int, bool]]:
    """(row, its last line, whether something in it was replaced), without blank lines."""
    limit = file.size if file.size < file.full_size and not file.packing else sys.maxsize
    for row in reader:
        if lines.bytes >= limit:
            return
        if row:
            yield row, reader.line_num, lines.lossy
            lines.lossy = False


def _without_last(rows: Iterator[_T]) -> Iterator[_T]:
    """A part of a file may end with half a row."""
    return (row for row, _ in pairwise(rows))


def _bad_row(request: Request, file: SourceFile, line: int, problem: str) -> ConfigError:
    hint = f"{file.path}:{line}: {problem}. Correct or delete that line."
    return request.error("rows as wide as the header, with quotes around commas", hint)


def _refuse_two(request: Request, file: SourceFile, columns: Sequence[str]) -> None:
    """Of two columns with the wanted name nobody knows which one is meant."""
    if (many := columns.count(request.field)) > 1:
        raise request.no_field("a column of its own name", f"{file.path} has {many} such columns.")


@dataclass(frozen=True)
class Column:
    """The wanted column of a file whose rows come in batches."""

    ends: list[int]
    """The row after the last one of each batch."""
    read: Callable[[range], Iterator[Sequence[str | None]]]
    """Rows of consecutive batches, a few at a time."""

    def texts(self, start: int, stop: int) -> Iterator[str]:
        """Rows ``start`` to ``stop - 1``; no text where there is none."""
        batches = range(bisect_right(self.ends, start), bisect_left(self.ends, stop) + 1)
        at = self.ends[batches.start - 1] if batches.start else 0
        for rows in self.read(batches):
            yield from (text or "" for text in rows[max(start - at, 0) : max(stop - at, 0)])
            at += len(rows)


def _library(request: Request, name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        hint = f"{what} needs pyarrow: pip install 'weft[parquet]'."
        raise request.error("a format that can be read here", hint) from None


def _check_column(request: Request, file: SourceFile, schema: Any) -> None:
    field = request.field
    if field not in schema.names:
        raise no_text(request, file.path, dict.fromkeys(schema.names))
    _refuse_two(request, file, schema.names)
    kind = str(schema.field(field).type)
    if not kind.startswith(_TEXT_TYPES):
        hint = f"{file.path} has {kind} there."
        raise request.no_field("a column of strings", hint)


def _parquet(request: Request, file: SourceFile) -> Column:
    parquet = _library(request, "pyarrow.parquet", "Parquet")
    unreadable = import_module("pyarrow").ArrowException, OSError
    try:
        opened = parquet.ParquetFile(file.path)
    except unreadable as error:
        raise request.error("Parquet files", f"{file.path}: {error}") from None
    _check_column(request, file, opened.schema_arrow)
    groups = map(opened.metadata.row_group, range(opened.num_row_groups))

    def read(batches: range) -> Iterator[Sequence[str | None]]:
        try:
            for found in opened.iter_batches(_ROWS, row_groups=batches, columns=[request.field]):
                yield found.column(0).to_pylist()
        except unreadable as error:
            raise request.error("Parquet files", f"{file.path}: {error}") from None

    return Column(list(accumulate(group.num_rows for group in groups)), read)


def _arrow(request: Request, file: SourceFile) -> Column:
    """Of a stream of batches, as Hugging Face's ``datasets`` writes it, or of an Arrow file."""
    ipc = _library(request, "pyarrow.ipc", "Arrow")
    arrow = import_module("pyarrow")
    try:
        mapped = arrow.memory_map(file.path)
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        table = (ipc.open_file if is_file else ipc.open_stream)(mapped).read_all()
    except (arrow.ArrowException, OSError) as error:
        raise request.error("Arrow files", f"{file.path}: {error}") from None
    _check_column(request, file, table.schema)
    chunks = table.column(request.field).chunks

    def read(batches: range) -> Iterator[Sequence[str | None]]:
        for number in batches:
            for low in range(0, len(chunks[number]), _ROWS):
                yield chunks[number].slice(low, _ROWS).to_pylist()

    return Column(list(accumulate(map(len, chunks))), read)


COLUMNS: dict[str, Callable[[Request, SourceFile], Column]] = {
    "parquet": _parquet,
    "arrow": _arrow,
}
"""How a file with columns is opened, by its kind."""
