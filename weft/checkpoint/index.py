"""The index of a checkpoint: ``index.json``, what is stored where, and whether that adds up.

What is read here is not trusted: a file name must be a rank file's, a box must lie in its tensor,
and every element must be stored exactly once, or the index is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    JSON,
    CheckpointError,
    Count,
    RankFile,
    StoredTensor,
    fits,
)
from weft.checkpoint.place import Place
from weft.checkpoint.remote.path import RemotePath
from weft.plan.box import Box
from weft.plan.tiling import Tiling
from weft.version import __version__

SCHEMA = 2
_READ_SCHEMAS = (1, SCHEMA)
"""In schema 1 every box has one checksum."""
INDEX = "index.json"
_SHOWN = 3


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

    @property
    def is_finite(self) -> bool:
        """What was saved are numbers, as far as was recorded."""
        return self.state.get("finite") is not False


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


def refuse(found: Sequence[str], file: object) -> None:
    """Raise CheckpointError that says the first few problems, if there are any."""
    if found:
        more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
        raise CheckpointError("; ".join(found[:_SHOWN]) + more, file=file)


def resolve_inside(folder: Place, file: str) -> Place:
    """The path of a file of a checkpoint. Raises CheckpointError if it would leave the folder."""
    if isinstance(folder, RemotePath):
        return folder / file  # there are no links, and a rank file's name has no slash
    path = folder / file
    if Path(os.path.realpath(path)).parent != Path(os.path.realpath(folder)):
        raise CheckpointError("leads out of the checkpoint's folder", file=path)
    return path


def to_text(index: Index) -> str:
    """What ``from_text`` reads. State must be JSON; numbers in it must be finite."""
    files = [asdict(facts) for facts in index.files.values()]
    data: dict[str, JSON] = {
        "schema": SCHEMA,
        "weft": index.weft,
        "step": index.step,
        "saved_at": index.saved_at,
        "files": [{key: facts[key] for key in ("file", "bytes", "sha256")} for facts in files],
        "tensors": [asdict(tensor) for tensor in index.tensors.values()],
        "state": index.state,
    }
    return json.dumps({**data, "sha256": _digest(data)}, allow_nan=False)


def _digest(data: Mapping[str, JSON]) -> str:
    """Of the JSON text of everything in the index but the digest itself."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def from_text(text: str | bytes, file: object) -> Index:
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
        schema = _field(data, "schema", Count)
        if schema not in _READ_SCHEMAS:
            raise ValueError(f"schema {schema}, and this Weft reads schemas 1 to {SCHEMA}")
        if _field(data, "sha256", str) != _digest({k: data[k] for k in data if k != "sha256"}):
            raise ValueError("it is not what was written (sha256)")
        files = _field(data, "files", tuple[RankFile, ...])
        tensors = _field(data, "tensors", tuple[StoredTensor, ...])
        index = Index(
            step=_field(data, "step", Count),
            saved_at=_field(data, "saved_at", float),
            weft=_field(data, "weft", str),
            files={facts.file: facts for facts in files},
            tensors={(tensor.kind, tensor.name): tensor for tensor in tensors},
            state=_field(data, "state", dict[str, Any]),
        )
        if len(index.files) != len(files) or len(index.tensors) != len(tensors):
            raise ValueError("the same file or tensor is listed twice")
    except ValueError as error:
        raise CheckpointError(str(error), file=file) from error
    return index


def rank_file_json(rank_file: RankFile) -> dict[str, JSON]:
    """What a rank sends to the one that commits."""
    return asdict(rank_file)


def rank_file_from_json(data: object) -> RankFile:
    """What ``rank_file_json`` gave. Raises CheckpointError for anything else."""
    try:
        found: RankFile = _read(data, RankFile)
    except ValueError as error:
        raise CheckpointError(f"not the facts of a rank's file: {error}") from error
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _field(data: object, key: str, kind: Any) -> Any:
    return _read(data.get(key) if isinstance(data, dict) else None, kind, key)


_adapter = functools.cache(TypeAdapter)  # making one takes ten times as long as a small index


def _read(data: object, kind: Any, *place: str) -> Any:
    """JSON as ``kind`` has it. Raises ValueError that says where it is not, and the value there."""
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (*place, *first["loc"])))
        value = None if first["type"] == "missing" else first["input"]
        text = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where} = {repr(value)[:60]}: {text}") from error
