"""Loading: any box of any tensor, whatever boxes the ranks that saved it held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.entry import (
    JSON,
    CheckpointError,
    RankFile,
    StoredTensor,
    box_key,
    fits,
    told,
)
from weft.checkpoint.index import INDEX, Index
from weft.checkpoint.place import Place, checkpoints_of
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.rank_file_reader import RankFileReader, open_rank_file
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.remote.rank_file import RemoteRankFile
from weft.checkpoint.run_of import run_of
from weft.checkpoint.shard import DTYPES
from weft.checkpoint.store import (
    LATEST,
    candidates,
    complete,
    folder_step,
    read_index,
    read_latest,
    step_name,
)
from weft.plan.box import Box


class Checkpoint:
    """An open checkpoint. Reads from its files on demand and changes nothing.

    Args:
        folder: The checkpoint's own folder.
        index: Its index, as ``read_index`` gave it.
        notes: What a person should know about how it was chosen, one sentence each.
        run: The folder of the run that it is of, where that was named.
        opened: Opens a rank's file; None: they lie in the folder.
    """

    def __init__(
        self,
        folder: Place,
        index: Index,
        notes: tuple[str, ...] = (),
        *,
        run: Path | None = None,
        opened: Callable[[RankFile], RankFileReader | RemoteRankFile] | None = None,
    ) -> None:
        self.folder = folder
        self.index = index
        self.notes = notes
        self._run = run
        self._opened = opened or partial(open_file, folder)
        self._files: dict[str, RankFileReader | RemoteRankFile] = {}

    @property
    def run(self) -> Path | None:
        """The folder of the run that it is of, as far as is known.

        Raises CheckpointError where the storage does not answer.
        """
        return self._run or run_of(self.folder.parent)

    def close(self) -> None:
        """Let go of what was opened, and of memory that holds it."""
        self._files.clear()
        self._opened = partial(open_file, self.folder)

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def state(self) -> Mapping[str, JSON]:
        """What ``commit`` was given beside the tensors."""
        return self.index.state

    @property
    def files(self) -> Mapping[str, RankFile]:
        return self.index.files

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self.index.tensors})

    def names(self, kind: str = "param") -> list[str]:
        """Logical names that have a tensor of this kind, in the order they were saved."""
        return [name for stored_kind, name in self.index.tensors if stored_kind == kind]

    def shape(self, name: str, kind: str = "param") -> tuple[int, ...]:
        """Shape of a whole logical tensor. Raises CheckpointError if it is not stored."""
        return self._tensor(name, kind).shape

    def dtype(self, name: str, kind: str = "param") -> torch.dtype:
        """The stored dtype. Raises CheckpointError if the tensor is not stored."""
        return DTYPES[self._tensor(name, kind).dtype]

    def read(
        self,
        name: str,
        kind: str = "param",
        box: Box | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The elements of ``box`` (None: all of them): a new CPU tensor of shape ``box.size``.

        ``dtype`` None keeps the stored one. Raises as ``read_into``.
        """
        tensor = self._tensor(name, kind)
        size = tensor.shape if box is None else box.size
        result = torch.empty(size, dtype=dtype or DTYPES[tensor.dtype])
        self.read_into(result, name, kind, box)
        return result

    def read_into(
        self, out: Tensor, name: str, kind: str = "param", box: Box | None = None
    ) -> None:
        """Copy the elements of ``box`` (None: all of them) into ``out``: ``[*box.size]``, of any
        dtype, on any device. Touches only the files and bytes that the box needs.

        Raises:
            CheckpointError: no such tensor or box, or its file is missing, of another size or
                shape, or holds other elements than were written (of all chunks that hold one that
                is wanted). ``out`` holds anything then.
        """
        tensor = self._tensor(name, kind)
        wanted = Box.whole(tensor.shape) if box is None else box
        if not fits(wanted, tensor.shape):
            problem = f"lies outside the stored shape {tensor.shape}"
            raise self._error(problem, box_key(kind, name, wanted))
        assert tuple(out.shape) == wanted.size, f"{tuple(out.shape)} for {wanted}"
        for stored in tensor.boxes:
            common = stored.box.intersect(wanted)
            if common is not None:
                part = out.detach()[common.within(wanted).slices()]  # [*common.size]
                self._file(stored.file).read_into(part, tensor, stored, common)

    def require(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        kinds: Iterable[str],
        allow_missing: Iterable[str] = (),
    ) -> list[str]:
        """Refuse to go on unless this checkpoint fits the model that wants it.

        Every name of ``shapes`` must be stored in every one of ``kinds`` with that shape, and
        nothing else may be stored in these kinds. A tensor that lacks a kind of ``allow_missing``
        is returned, as ``kind/name``, instead: the caller starts it afresh.

        Raises:
            CheckpointError: names the first tensors that are missing, unwanted or of another shape.
        """
        allowed = frozenset(allow_missing)
        missing: list[str] = []
        excused: list[str] = []
        for kind in kinds:
            self._refuse_unlike(shapes, kind)
            absent = [f"{kind}/{name}" for name in shapes if (kind, name) not in self.index.tensors]
            (excused if kind in allowed else missing).extend(absent)
        if missing:
            raise self._error(f"{_some(missing)} not stored, and there is no leave to start afresh")
        return excused

    def _refuse_unlike(self, shapes: Mapping[str, tuple[int, ...]], kind: str) -> None:
        unwanted = [f"{kind}/{name}" for name in self.names(kind) if name not in shapes]
        if unwanted:
            raise self._error(f"{_some(unwanted)} stored, but the model has no such tensor")
        for name in self.names(kind):
            stored = self.shape(name, kind)
            if stored != tuple(shapes[name]):
                problem = f"stored with shape {stored}, the model has {tuple(shapes[name])}"
                raise self._error(problem, f"{kind}/{name}")

    def _tensor(self, name: str, kind: str) -> StoredTensor:
        tensor = self.index.tensors.get((kind, name))
        if tensor is None:
            raise self._error("is not stored", f"{kind}/{name}")
        return tensor

    def _file(self, file: str) -> RankFileReader | RemoteRankFile:
        if file not in self._files:
            self._files[file] = self._opened(self.files[file])
        return self._files[file]

    def _error(self, problem: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(problem, file=self.folder, tensor=tensor)


def open_file(folder: Place, facts: RankFile) -> RankFileReader | RemoteRankFile:
    """A rank's file, wherever it lies.

    Raises CheckpointError for one that is missing, of another size, or not safetensors.
    """
    if isinstance(folder, RemotePath):
        path = folder / facts.file
        check_size(path, facts)
        return RemoteRankFile(path, facts)
    return open_rank_file(folder, facts)


def _some(tensors: list[str]) -> str:
    shown = ", ".join(tensors[:3])
    rest = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{shown}{rest} {'is' if len(tensors) == 1 else 'are'}"


def open_checkpoint(path: Place) -> Checkpoint:
    """Open a checkpoint's folder, or the latest of a folder of checkpoints or of a run.

    In a folder of checkpoints, where ``latest`` is missing, unreadable or names one that is not
    complete, the complete one that was saved last is opened and ``notes`` says so.

    Raises:
        CheckpointError: there is nothing there, or nothing complete. A checkpoint that is named
            itself is opened or refused, never replaced by another.
    """
    if is_checkpoint(path):
        return Checkpoint(path, read_index(path))
    root = checkpoints_root(path)
    run = path if isinstance(path, Path) and root != path else None
    name = read_latest(root)
    note = f"{root / LATEST} names no checkpoint"
    for folder in candidates(root) if name is not None else ():
        if name == step_name(folder_step(folder)):
            try:
                return Checkpoint(folder, read_index(folder), run=run)
            except CheckpointError as error:
                note = str(error)
    found = complete(root)
    if not found:
        raise CheckpointError("no complete checkpoint here", file=root)
    folder, index = max(found, key=lambda entry: (entry[1].saved_at, entry[1].step))
    note = f"{note}; opened {folder.name}, which is complete."
    return Checkpoint(folder, index, (note,), run=run)


def is_checkpoint(path: Place) -> bool:
    """The folder is one checkpoint, sound or not, rather than a folder of them."""
    with told("read", path):
        return (path / INDEX).exists() or folder_step(path) >= 0


def checkpoints_root(path: Place) -> Place:
    """The folder of checkpoints at ``path``: itself, or a run's, wherever that lies.

    Raises CheckpointError if there is no such folder.
    """
    with told("read", path):
        if isinstance(path, RemotePath):
            root: Place = path
        else:
            root = checkpoints_of(path)
            root = root if root.is_dir() else path
        if not root.is_dir():
            raise CheckpointError("no such folder", file=path)
    return root
