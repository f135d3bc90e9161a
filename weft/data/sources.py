"""What a source consists of: its files in order, found by name and size without being read."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from weft.config.errors import ConfigError
from weft.data.hashing import identity_hash

BUILTIN_PYTHON = "builtin:python"
_TEXT_SUFFIXES = """
txt text md markdown mdx rst adoc asciidoc org tex bib log srt vtt po diff patch py pyi pyx ipy
c h cc cpp cxx hh hpp hxx cu cuh m mm rs go java kt kts scala groovy gradle clj cljs ex exs erl
hrl hs lhs ml mli fs fsx f f77 f90 f95 f03 f08 for ada adb ads pas d nim zig v sv vhd vhdl js
jsx mjs cjs ts tsx vue svelte php phtml rb pl pm lua tcl r rmd jl dart swift cs vb sql sh bash
zsh fish ps1 bat cmd awk sed asm s ll lisp lsp el scm rkt coq lean thy agda idr sol proto thrift
graphql cmake mk make bzl dockerfile tf nix toml ini cfg conf yaml yml properties html htm xhtml
css scss sass less en de fr es it pt nl sv da fi pl cs ru uk tr ar he hi ja ko zh raw tokens
"""
_SUFFIXES = {
    **{f".{suffix}": "text" for suffix in _TEXT_SUFFIXES.split()},
    "": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".idx": "tokens",
}
_PACKED = {".gz": "gzip", ".zst": "zstd"}
_CAN_BE_PACKED = ("text", "jsonl", "csv", "tsv")
_ALLOWED = (
    "text, .jsonl, .csv or .tsv (each also as .gz or .zst), .parquet, .arrow or a Megatron .idx"
)
ROWS = ("jsonl", "csv", "tsv")
"""Kinds of text with a document in each row."""
_UTF16 = b"\xff\xfe", b"\xfe\xff"
"""How text begins that has two bytes a character."""
_STATE = "state.json"
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}
_TOPICS = "pydoc_data/topics.py"
_SNIFF_BYTES = 8192
_TAIL_BYTES = 1 << 16


class SourceFile(NamedTuple):
    """One file of a source."""

    name: str
    """Path inside the source, with forward slashes; what identifies it on any machine."""
    path: str
    """Where it lies; for "tokens" without the suffix."""
    kind: str
    """How documents lie in it: "text", "jsonl", "csv", "tsv", "parquet", "arrow", "topics"
    (Python's manual) or "tokens" (a Megatron .bin/.idx pair)."""
    size: int
    """Bytes to read, at most what the file has."""
    full_size: int
    modified_ns: int
    packing: str = ""
    """How its bytes are compressed: "gzip", "zstd", or not at all."""


class Request(NamedTuple):
    """One source as the config asks for it."""

    key: str
    """Config key of its path, for messages."""
    path: str
    format: str = "auto"
    field: str = "text"
    """Key or column with a row's text."""

    def key_of(self, name: str) -> str:
        """Config key of another field of the same source."""
        entry = self.key.removesuffix(".path") if "[" in self.key else "data.sources[0]"
        return f"{entry}.{name}"

    def giving(self, name: str, value: str) -> str:
        """How another field of the same source is given: beside a path alone there is none, and
        one of a list is changed where the list is."""
        if self.key != "data.path":
            return f"`{name}: {value}` in {self.key.removesuffix('.path')}"
        return f"data.path=null 'data.sources=[{{path: {self.path}, {name}: {value}}}]'"

    def no_field(self, expected: str, hint: str) -> ConfigError:
        """A complaint about the field of this source."""
        if self.key == "data.path":
            hint += f" Name another: {self.giving('field', 'NAME')}."
        return ConfigError(self.key_of("field"), self.field, expected, hint)

    def error(self, expected: str, hint: str = "") -> ConfigError:
        """A complaint about the path of this source."""
        return ConfigError(self.key, self.path, expected, hint)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything about one source that can be known without reading it."""

    request: Request
    files: tuple[SourceFile, ...]
    """By name."""
    skipped: tuple[str, ...] = ()
    """Names of files that are not text."""

    def stamp(self) -> str:
        """Hash of the files' names, sizes and times of change: differs when a file changed."""
        lines = (f"{f.name}\0{f.size}\0{f.full_size}\0{f.modified_ns}" for f in self.files)
        return f"{identity_hash(*map(name_bytes, lines)):016x}"


def name_bytes(name: str) -> bytes:
    """To hash a file's name, whatever bytes it has, alike on every machine."""
    return name.encode(errors="surrogateescape")


def open_source(request: Request, limit_bytes: int | None) -> Source:
    """List the files of a source; with a limit, only as many as hold that many bytes.

    Files for a limited source are taken in the order of a hash of their names, so that they are a
    fair sample; the last one is cut.

    Raises ConfigError: there is no such path, it is empty, or it holds nothing to read, or
    something that nobody may read.
    """
    try:
        found, skipped = _found(request, Path(request.path).expanduser())
    except OSError as error:
        hint = f"{error.filename}: {error.strerror}."
        raise request.error("a file or a folder that can be read, with all in it", hint) from error
    files = sorted(file for file in found if file.size)
    if not files:
        raise _nothing(request, found, skipped)
    if limit_bytes is not None:
        files = _take(files, limit_bytes)
    return Source(request=request, files=tuple(files), skipped=tuple(sorted(skipped)))


def _found(request: Request, path: Path) -> tuple[list[SourceFile], list[str]]:
    """What there is to read, and names of what is not text."""
    if request.path == BUILTIN_PYTHON:
        return _standard_library(request), []
    if path.is_dir():
        return _folder(request, path)
    if path.is_file() or path.with_name(path.name + ".idx").is_file():
        return [_single(request, path)], []
    hint = f'"{BUILTIN_PYTHON}" needs no file.'
    raise request.error("a file or a folder that exists", "" if path.exists() else hint)


def _nothing(request: Request, found: Sequence[SourceFile], skipped: Sequence[str]) -> ConfigError:
    """What would have been something to read, and what was found instead."""
    if found:
        return request.error("a source with text in it", "It is empty.")
    if skipped:
        hint = f"It has {len(skipped)} files, such as {skipped[0]}, of other formats."
        return request.error(f"a folder with {_ALLOWED}", hint)
    what = "files" if request.format in ("auto", "text") else f"{request.format} files"
    return request.error(f"a folder with {what}", "It has none.")


def _take(files: Sequence[SourceFile], limit_bytes: int) -> list[SourceFile]:
    taken: list[SourceFile] = []
    left = limit_bytes
    for file in sorted(files, key=lambda file: identity_hash(name_bytes(file.name))):
        if left <= 0:
            break
        size = min(file.size, left)
        if file.kind == "text" and not file.packing and size < file.size:
            with Path(file.path).open("rb") as stream:
                size = last_line_end(stream, size)
        taken.append(file._replace(size=size))
        left -= file.size
    return sorted(taken)


def last_line_end(stream: BinaryIO, size: int) -> int:
    """At most ``size`` bytes that end with a line, or else with a character; there are more."""
    start = max(size - _TAIL_BYTES, 0)
    stream.seek(start)
    tail = stream.read(size - start + 1)
    newline = tail.rfind(b"\n", 0, size - start)
    if newline >= 0:
        return start + newline + 1
    end = len(tail) - 1
    while end > max(len(tail) - 4, 1) and tail[end] & 0xC0 == 0x80:
        end -= 1
    return start + end


def _kind(name: str) -> tuple[str, str]:
    """(kind, packing) of a file by the end of its name; no kind where that says nothing."""
    path = PurePath(name.lower())
    packing = _PACKED.get(path.suffix, "")
    kind = _SUFFIXES.get(path.with_suffix("").suffix if packing else path.suffix, "")
    return ("" if packing and kind not in _CAN_BE_PACKED else kind), packing


def _single(request: Request, path: Path) -> SourceFile:
    auto = request.format == "auto"
    if auto and path.suffix.lower() == ".bin" and path.with_suffix(".idx").is_file():
        path = path.with_suffix(".idx")
    if not path.is_file():
        path = path.with_name(path.name + ".idx")
    kind, packing = _kind(path.name)
    kind = kind if auto else request.format
    if not kind or (auto and kind == "text" and _is_binary(path, packing)):
        raise _not_read(request, path, packing)
    if kind == "tokens" and not path.with_suffix(".bin").is_file():
        name = path.with_suffix(".bin").name
        raise request.error("a .idx with its .bin beside it", f"{name} is missing.")
    return _file(path.name, path, kind, path.stat(), packing)


def _not_read(request: Request, path: Path, packing: str) -> ConfigError:
    """What would have been a format; that bytes may be text is said of what may be text alone."""
    hint = f"{request.giving('format', 'text')} reads it as text, whatever its name ends with."
    if packing:
        hint = ""
    elif _is_binary(path, packing):
        with path.open("rb") as file:
            hint = to_utf8(path, file.peek()) or "It holds zero bytes, as text does not."
    return request.error(_ALLOWED, hint)


def _folder(request: Request, root: Path) -> tuple[list[SourceFile], list[str]]:
    """The files below a folder, hidden ones apart, and the names of those that are not text."""
    files: list[SourceFile] = []
    skipped: list[str] = []
    format_ = request.format
    found = list(_walk(root, lambda name: name.startswith(".") or name == "__pycache__"))
    ignored = _of_datasets_own(request, root, [name for name, _ in found])
    for name, entry in found:
        path = Path(entry.path)
        kind, packing = _kind(path.name)
        if format_ == "text":
            kind = "text"
        elif name in ignored or format_ not in ("auto", kind):
            continue
        elif path.suffix == ".bin" and path.with_suffix(".idx").is_file():
            continue  # the index stands for both
        elif not kind or (kind == "text" and _is_binary(path, packing)):
            skipped.append(name)
            continue
        files.append(_file(name, path, kind, entry.stat(), packing))
    return files, skipped


def _of_datasets_own(request: Request, root: Path, names: Sequence[str]) -> set[str]:
    """Files in folders that Hugging Face's ``datasets`` saved, other than the data it lists.

    Raises ConfigError: a folder of several splits, or one that lacks a file.
    """
    if request.format not in ("auto", "arrow"):
        return set()
    kept: dict[str, set[str]] = {}
    for name in names:
        folder, _, own_name = name.rpartition("/")
        if own_name == "dataset_dict.json":
            splits = sorted({n.split("/")[-2] for n in names if n.endswith(f"/{_STATE}")})
            hint = f"{root / folder} has the splits {', '.join(splits)}: name the folder of one."
            raise request.error("one split of a saved dataset", hint)
        listed = _listed(root / name) if own_name == _STATE else set()
        if listed:
            kept[folder] = listed
        for missing in sorted(n for n in listed if not (root / folder / n).is_file()):
            hint = f"{root / folder / missing} is missing."
            raise request.error("a whole saved dataset", f"{hint} Copy it again.")
    parts = [(name, *name.rpartition("/")[::2]) for name in names]
    return {name for name, folder, own in parts if folder in kept and own not in kept[folder]}


def _listed(state: Path) -> set[str]:
    """The data files that a ``state.json`` of ``datasets`` lists; none where it is another's."""
    try:
        return {entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return set()


def _standard_library(request: Request) -> list[SourceFile]:
    """Python's own library, without tests and what differs from machine to machine."""
    root = Path(sysconfig.get_paths()["stdlib"])

    def foreign(name: str) -> bool:
        return name in _NOT_LIBRARY or name.startswith((".", "__pycache__", "config-"))

    found: list[SourceFile] = []
    for name, entry in _walk(root, foreign):
        if not name.endswith(".py") or name.startswith("_sysconfigdata"):
            continue
        kind = "topics" if name == _TOPICS else "text"
        found.append(_file(name, Path(entry.path), kind, entry.stat()))
    if not found:
        hint = f"{root} has no .py files; name a file or folder of text instead."
        raise request.error("Python's standard library as source files", hint)
    return found


def _walk(root: Path, leave_out: Callable[[str], bool]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(path below ``root``, entry) of every ordinary file, a folder's links included.

    A folder that is met again, by a link, is not entered twice.
    """
    pending: list[tuple[str, str]] = [("", str(root))]
    entered: set[tuple[int, int]] = set()
    while pending:
        prefix, folder = pending.pop()
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not leave_out(entry.name)]
        for entry in sorted(kept, key=lambda entry: entry.name, reverse=True):
            if entry.is_dir():
                pending.append((f"{prefix}{entry.name}/", entry.path))
            elif entry.is_file():
                yield prefix + entry.name, entry


def _is_binary(path: Path, packing: str) -> bool:
    """Zero bytes at its start; what is packed is only seen when it is unpacked."""
    if packing:
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(_SNIFF_BYTES)


def to_utf8(path: str | Path, begin: bytes) -> str:
    """What makes text of a file in UTF-16 that can be read, told by how it begins; else empty."""
    hint = f"{path} is in UTF-16: convert it, with `iconv -f UTF-16 -t UTF-8`."
    return hint if begin.startswith(_UTF16) else ""


def _file(
    name: str, path: Path, kind: str, status: os.stat_result, packing: str = ""
) -> SourceFile:
    size = status.st_size
    if kind == "tokens":
        data = path.with_suffix(".bin")
        size += data.stat().st_size if data.is_file() else 0
        path = path.with_suffix("")
    packing = packing if kind in _CAN_BE_PACKED else ""
    return SourceFile(name, str(path), kind, size, size, status.st_mtime_ns, packing)
