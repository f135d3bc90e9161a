"""The index of a checkpoint: ``index.json``, what is stored where, and whether that adds up.

What is read here is not trusted: a file name must be a rank file's, a box must lie in its tensor,
and every element must be stored exactly once, or the index is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    DTYPES,
    JSON,
    CheckpointError,
    RankFile,
    StoredBox,
    StoredTensor,
    fits,
)
from weft.plan.box import Box
from weft.plan.tiling import Tiling
from weft.version import __version__

SCHEMA = 2
_READ_SCHEMAS = (1, SCHEMA)
"""In schema 1 every box has one checksum."""
INDEX = "index.json"
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors", re.ASCII)
_SHOWN = 3

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Everything about a checkpoint but its tensors' elements."""

    step: int
    saved_at: float
    """Seconds since 1970."""
    weft: str
    """Version that wrote it."""
    files: Mapping[str, RankFile]
    """By file name, without ``tensors``."""
    tensors: Mapping[tuple[str, str], StoredTensor]
    """By (kind, name)."""
    state: Mapping[str, JSON] = field(default_factory=dict)


def rank_file_name(rank: int) -> str:
    """``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def merge(
    step: int, rank_files: Sequence[RankFile], state: Mapping[str, JSON], saved_at: float
) -> Index:
    """The index of what the ranks wrote. Raises CheckpointError where they disagree on a tensor."""
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for tensor in (tensor for rank_file in rank_files for tensor in rank_file.tensors):
        known = tensors.setdefault((tensor.kind, tensor.name), replace(tensor, boxes=()))
        if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"ranks disagree: {known.dtype} {known.shape} and {tensor.dtype} {tensor.shape}",
                tensor=tensor.id,
            )
        merged = replace(known, boxes=known.boxes + tensor.boxes)
        tensors[tensor.kind, tensor.name] = merged
    return Index(
        step=step,
        saved_at=saved_at,
        weft=__version__,
        files={rank_file.file: replace(rank_file, tensors=()) for rank_file in rank_files},
        tensors=tensors,
        state=state,
    )


def problems(index: Index) -> list[str]:
    """What does not add up, in words: elements stored nowhere or twice, files too small."""
    found: list[str] = []
    held = dict.fromkeys(index.files, 0)
    for tensor in index.tensors.values():
        strange = [stored.file for stored in tensor.boxes if stored.file not in held]
        if strange:
            found.append(f"{tensor.id}: {strange[0]} is not among the files of the index")
            continue
        for stored in tensor.boxes:
            num_bytes = tensor.num_bytes(stored.box)
            held[stored.file] += num_bytes
            if len(stored.crc32) not in (1, -(-num_bytes // CHUNK_BYTES)):
                found.append(f"{tensor.key(stored)}: {len(stored.crc32)} checksums")
        found += _tiling_problems(tensor)
    for file, num_bytes in held.items():
        if num_bytes > index.files[file].bytes:
            found.append(f"{file}: {index.files[file].bytes} bytes cannot hold {num_bytes}")
    return found


def _tiling_problems(tensor: StoredTensor) -> list[str]:
    boxes = [stored.box for stored in tensor.boxes]
    outside = [box for box in boxes if not fits(box, tensor.shape)]
    if outside:
        return [f"{tensor.id}: {outside[0]} is outside {tensor.shape}"]
    missing = Tiling(tensor.shape, dict(enumerate((box,) for box in boxes))).uncovered()
    found = [f"{tensor.id}: no file holds {box}" for box in missing[:_SHOWN]]
    excess = sum(box.numel for box in boxes + missing) - Box.whole(tensor.shape).numel
    if excess:
        overlaps = (a.intersect(b) for a, b in combinations(boxes, 2))
        twice = next(box for box in overlaps if box is not None)
        found.append(f"{tensor.id}: {twice} is stored more than once")
    return found


def refuse(found: Sequence[str], file: Path) -> None:
    """Raise CheckpointError that says the first few problems, if there are any."""
    if found:
        more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
        raise CheckpointError("; ".join(found[:_SHOWN]) + more, file=file)


def resolve_inside(folder: Path, file: str) -> Path:
    """The path of a file of a checkpoint. Raises CheckpointError if it would leave the folder."""
    path = folder / file
    if Path(os.path.realpath(path)).parent != Path(os.path.realpath(folder)):
        raise CheckpointError("leads out of the checkpoint's folder", file=path)
    return path


def to_text(index: Index) -> str:
    """What ``from_text`` reads. State must be JSON; numbers in it must be finite."""
    data: dict[str, JSON] = {
        "schema": SCHEMA,
        "weft": index.weft,
        "step": index.step,
        "saved_at": index.saved_at,
        "files": [
            {"file": facts.file, "bytes": facts.bytes, "sha256": facts.sha256}
            for facts in index.files.values()
        ],
        "tensors": [_tensor_json(tensor) for tensor in index.tensors.values()],
        "state": index.state,
    }
    return json.dumps({**data, "sha256": _digest(data)}, allow_nan=False)


def _digest(data: Mapping[str, JSON]) -> str:
    """Of the JSON text of everything in the index but the digest itself."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def from_text(text: str | bytes, file: Path) -> Index:
    """Parse an index. ``file`` is for messages.

    Raises CheckpointError: not JSON, an unknown schema, another digest than its own, a field that
    is missing or of another type, a file name that is not a rank file's. ``problems`` checks what
    the fields say.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a readable index: {error}", file=file) from error
    try:
        schema = _field(data, "schema", int)
        if schema not in _READ_SCHEMAS:
            raise _BadFieldError(f"schema {schema}, and this Weft reads schemas 1 to {SCHEMA}")
        if _field(data, "sha256", str) != _digest({k: data[k] for k in data if k != "sha256"}):
            raise _BadFieldError("it is not what was written (sha256)")
        listed = [_rank_file(entry) for entry in _field(data, "files", list)]
        tensors = [_tensor(entry) for entry in _field(data, "tensors", list)]
        index = Index(
            step=_count(_field(data, "step", int)),
            saved_at=float(_field(data, "saved_at", float)),
            weft=_field(data, "weft", str),
            files={facts.file: facts for facts in listed},
            tensors={(tensor.kind, tensor.name): tensor for tensor in tensors},
            state=_field(data, "state", dict),
        )
    except _BadFieldError as error:
        raise CheckpointError(str(error), file=file) from error
    if len(index.files) != len(listed) or len(index.tensors) != len(tensors):
        raise CheckpointError("the same file or tensor is listed twice", file=file)
    return index


def rank_file_json(rank_file: RankFile) -> dict[str, JSON]:
    """What a rank sends to the one that commits."""
    return {
        "file": rank_file.file,
        "bytes": rank_file.bytes,
        "sha256": rank_file.sha256,
        "tensors": [_tensor_json(tensor) for tensor in rank_file.tensors],
    }


def rank_file_from_json(data: object) -> RankFile:
    """What ``rank_file_json`` gave. Raises CheckpointError for anything else."""
    try:
        facts = _rank_file(data)
        tensors = tuple(_tensor(entry) for entry in _field(data, "tensors", list))
    except _BadFieldError as error:
        raise CheckpointError(f"not the facts of a rank's file: {error}") from error
    return replace(facts, tensors=tensors)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _BadFieldError(Exception):
    """A field is missing or is not what it should be."""


def _field(data: object, key: str, kind: type[T]) -> T:
    value = data.get(key) if isinstance(data, dict) else None
    if type(value) is not kind:  # a bool is no int here
        shown = repr(value)
        raise _BadFieldError(f"{key} = {shown[:60]}: expected a JSON {kind.__name__}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise _BadFieldError(f"{repr(value)[:60]}: expected an integer >= 0")
    return value


def _counts(values: list[object]) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _rank_file(data: object) -> RankFile:
    file = _field(data, "file", str)
    if not _FILE_NAME.fullmatch(file):
        raise _BadFieldError(f"file = {file[:60]!r}: expected a name like {rank_file_name(0)}")
    return RankFile(file, _count(_field(data, "bytes", int)), _field(data, "sha256", str))


def _tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "kind": tensor.kind,
        "name": tensor.name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "boxes": [
            {"file": s.file, "offset": s.box.offset, "size": s.box.size, "crc32": s.crc32}
            for s in tensor.boxes
        ],
    }


def _tensor(data: object) -> StoredTensor:
    dtype = _field(data, "dtype", str)
    if dtype not in DTYPES:
        raise _BadFieldError(f"dtype = {dtype[:60]!r}: expected one of {', '.join(DTYPES)}")
    return StoredTensor(
        kind=_field(data, "kind", str),
        name=_field(data, "name", str),
        shape=_counts(_field(data, "shape", list)),
        dtype=dtype,
        boxes=tuple(_box(entry) for entry in _field(data, "boxes", list)),
    )


def _box(data: object) -> StoredBox:
    offset = _counts(_field(data, "offset", list))
    size = _counts(_field(data, "size", list))
    if len(offset) != len(size):
        raise _BadFieldError(f"offset {offset} and size {size}: expected equal lengths")
    many = isinstance(data, dict) and isinstance(data.get("crc32"), list)
    crc32 = _field(data, "crc32", list) if many else [_field(data, "crc32", int)]
    return StoredBox(_field(data, "file", str), Box(offset, size), _counts(crc32))
