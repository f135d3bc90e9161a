"""Checkpoints from and to folders of ``torch.distributed.checkpoint`` (DCP).

A parameter NAME is ``model.NAME`` there and an optimizer's tensor ``optim.state.NAME.KIND``: what
``dcp.load`` puts into ``{"model": ..., "optim": {"state": ...}}``. What a Weft checkpoint says
besides tensors is JSON, as bytes in ``weft.state``.

The ``.metadata`` of such a folder is a pickle, and unpickling runs what the file says. It is
read once, by an unpickler that makes objects of the few classes that describe tensors, named one
by one below, refuses any other name, functions too, and changes no class. Tensors are read with
``weights_only``. Entries that are no tensors would need a full unpickling, so they are never read:
they are named and left out.
"""

from __future__ import annotations

import io
import json
import pickle
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weft.checkpoint.draft import draft
from weft.checkpoint.entry import JSON, CheckpointError, told, wholly
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.shard import DTYPE_CODES, Shard, elements_of
from weft.checkpoint.store import candidates
from weft.checkpoint.verify import verify
from weft.plan.box import Box

METADATA = ".metadata"
_STATE = "weft.state"
_PARAM = "model."
_OPTIM = ("optim.state.", "optimizer.state.")
_DOT = "/"
"""Where a kind has a dot; none has such a stroke."""
_STEP = "step"
"""A number of the optimizer, beside its tensors: updates done."""

_META = "torch.distributed.checkpoint.metadata"
_ADMITTED = {
    _META: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
"""Module -> names: classes of data, and ``_get_layout``, which looks a name up in a table."""
_FILLED = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    _StorageInfo,
)
"""Whose objects get their values one by one after they are made."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did."""

    place: str
    step: int
    num_tensors: int
    left_out: list[str]
    """Entries that are no tensors, or of no kind that a checkpoint holds."""


def to_dcp(checkpoint: Checkpoint, folder: Path) -> Converted:
    """Write a checkpoint as one of DCP, and compare what it gives back; memory holds all of it.

    Raises CheckpointError where the folder cannot be written, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for kind in checkpoint.kinds:
        for name in checkpoint.names(kind):
            key = _PARAM + name if kind == "param" else f"{_OPTIM[0]}{name}.{_as_there(kind)}"
            tensors[key] = checkpoint.read(name, kind)
    updates = checkpoint.state.get("updates")
    if isinstance(updates, int):
        for name in _with_state(checkpoint):
            tensors[f"{_OPTIM[0]}{name}.{_STEP}"] = torch.tensor(float(updates))
    said = {"step": checkpoint.step, "state": checkpoint.state}
    text = bytearray(json.dumps(said).encode())
    tensors[_STATE] = torch.frombuffer(text, dtype=torch.uint8)
    with wholly(folder):
        _write(folder, tensors)
        _compare(folder, tensors)
    return Converted(str(folder), checkpoint.step, len(tensors) - 1, [])


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with told("written", folder), _alone():
            save(_nested(tensors), checkpoint_id=folder, no_dist=True)
    except (RuntimeError, CheckpointException) as error:  # a full disk, in a traceback of C++
        size, *_, last = sum(t.nbytes for t in tensors.values()), *str(error).strip().splitlines()
        problem = f"cannot be written; it needs {size / 1e6:,.0f} MB on the disk: {last}"
        raise CheckpointError(problem, file=folder) from error


def from_dcp(folder: Path, root: Place) -> Converted:
    """Make a checkpoint in ``root`` of a folder of DCP, and read every byte of it again.

    One that ``to_dcp`` wrote keeps its step and all that it says. Any other becomes step 0: its
    names have to be those of the model, as ``weft checkpoint show`` lists them.

    Raises CheckpointError where the folder is not one that can be read safely, holds no parameter,
    or ``root`` holds checkpoints already.
    """
    if root.is_dir() and candidates(root):
        raise CheckpointError("holds checkpoints already", file=root)
    reader = _Reader(folder)
    wanted = {
        key: entry
        for key, entry in reader.entries.items()
        if isinstance(entry, TensorStorageMetadata) and (key == _STATE or _place(key) is not None)
    }
    if not any(key.startswith(_PARAM) for key in wanted):
        raise CheckpointError(f"holds no tensor {_PARAM}NAME", file=folder)
    tensors = _read(reader, wanted)
    step, state = _said(tensors.pop(_STATE, None), folder)
    steps = {int(tensor) for key, tensor in tensors.items() if _is_step(key)}
    shards = [_shard(key, tensor) for key, tensor in tensors.items() if not _is_step(key)]
    if steps:
        state.setdefault("updates", max(steps))
    one = draft(root, step, "import")
    one.begin()
    made = one.commit([one.write(0, *elements_of(shards))], state)
    found = verify(made)
    if not found.ok:
        raise CheckpointError("; ".join(found.problems[:3]), file=made)
    left_out = sorted(set(reader.entries) - set(wanted))
    return Converted(str(made), step, len(shards), left_out)


_PLAIN: Any = pickle._Unpickler
"""The one of C shows nobody what it changes."""


class _Unpickler(_PLAIN):  # type: ignore[misc]
    """Makes what describes tensors, and nothing else."""

    dispatch: ClassVar = dict(_PLAIN.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Only objects get values: those of a class would change what is made of it later."""
        made, values = self.stack[-2:]
        is_filled = type(made) in _FILLED and isinstance(values, dict)
        if not (is_filled or type(made) is TensorProperties):
            raise pickle.UnpicklingError(f"it changes {reprlib.repr(made)}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _Reader(FileSystemReader):
    """PyTorch's own, but for the pickle, which is read once.

    Raises CheckpointError where that is not the metadata of a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _unpickled(folder / METADATA)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    @property
    def entries(self) -> dict[str, Any]:
        """What the folder holds, by name."""
        return self._metadata.state_dict_metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def _member(kind: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 write of an enumeration: ``getattr`` of it and a name."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {reprlib.repr(name)} of {reprlib.repr(kind)}")
    return kind[name]


def _unpickled(path: Path) -> Metadata:
    with told("read", path), path.open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
        except OSError:
            raise
        except Exception as error:
            problem = f"is not the metadata of a checkpoint, and is not unpickled: {error}"
            raise CheckpointError(problem, file=path) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"is a {type(metadata).__name__}", file=path)
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not (_is_by(str, entries) and _is_by(MetadataIndex, places)):
        raise CheckpointError("does not say by name what the folder holds", file=path)
    for info in places.values():
        name = info.relative_path if isinstance(info, _StorageInfo) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"names a file elsewhere: {name}", file=path)
    return metadata


def _is_by(kind: type, table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(key, kind) for key in table)


class _Planner(DefaultLoadPlanner):
    """Reads tensors alone: PyTorch's own unpickles the rest, and so runs what it says."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002 - theirs
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def _read(reader: _Reader, wanted: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    folder = reader.path
    try:
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in wanted.items()
        }
        unlike = [key for key, tensor in tensors.items() if tensor.dtype not in DTYPE_CODES]
        if unlike:
            raise CheckpointError(
                f"is of {tensors[unlike[0]].dtype}", file=folder, tensor=unlike[0]
            )
        with _alone():
            load(dict(tensors), storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(f"cannot be read: {_in_a_line(error)}", file=folder) from error
    return tensors


def _in_a_line(error: BaseException) -> str:
    """What went wrong; PyTorch's own error has the traceback of each process in it."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _compare(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    reader = _Reader(folder)
    found = _read(
        reader, {key: each for key, each in reader.entries.items() if not isinstance(each, _BYTES)}
    )
    for key, tensor in tensors.items():
        if key not in found or not _is_same(found[key], tensor):
            raise CheckpointError("is not what was written", file=folder, tensor=key)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Byte by byte: what is no number equals nothing."""
    facts = (one.dtype, one.shape) == (other.dtype, other.shape)
    return facts and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    CheckpointException,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What PyTorch raises of a folder whose metadata says anything."""
_BYTES = BytesStorageMetadata


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As training code has it: names of modules and kinds are not taken apart."""
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for key, tensor in tensors.items():
        kind, name = _place(key) or ("", "")
        if kind == "param":
            state["model"][name] = tensor
        elif kind:
            state["optim"]["state"].setdefault(name, {})[_as_there(kind)] = tensor
        else:
            state[key] = tensor
    return state


def _place(key: str) -> tuple[str, str] | None:
    """(kind, name) of a tensor by its name in DCP; None for what no checkpoint holds."""
    if key.startswith(_PARAM):
        return "param", key.removeprefix(_PARAM)
    for prefix in _OPTIM:
        name, dot, kind = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and dot and name and kind:
            return kind.replace(_DOT, "."), name
    return None


def _as_there(kind: str) -> str:
    """A kind as a part of a name there, which ends at a dot: ``site0.param`` has one itself."""
    return kind.replace(".", _DOT)


def _with_state(checkpoint: Checkpoint) -> Iterator[str]:
    kinds = [kind for kind in checkpoint.kinds if kind != "param"]
    yield from dict.fromkeys(name for kind in kinds for name in checkpoint.names(kind))


def _is_step(key: str) -> bool:
    return (_place(key) or ("",))[0] == _STEP


def _shard(key: str, tensor: Tensor) -> Shard:
    place = _place(key)
    assert place is not None, key
    kind, name = place
    shape = tuple(tensor.shape)
    return Shard(name, kind, shape, Box.whole(shape), tensor)


def _said(data: Tensor | None, folder: Path) -> tuple[int, dict[str, JSON]]:
    """Step and state that ``to_dcp`` kept of a checkpoint, or those of a new run."""
    if data is None:
        return 0, {"step": 0, "samples": 0}
    try:
        said = json.loads(bytes(data.tolist()))
        step, state = said["step"], said["state"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {error}", file=folder, tensor=_STATE) from error
    if not (type(step) is int and 0 <= step < 10**18 and isinstance(state, dict)):
        raise CheckpointError(f"says step {step!r}", file=folder, tensor=_STATE)
    return step, state


@contextmanager
def _alone() -> Iterator[None]:
    """One process is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
