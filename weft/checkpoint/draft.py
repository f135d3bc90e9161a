"""One save, until it is a checkpoint: the same few calls, wherever checkpoints lie.

One rank, or the process that writes for it, ``begin``s; then each ``write``s the files of its own
ranks, and those of other machines ``leave`` the facts of theirs; then the first one ``commit``s.
Whenever that is killed, the previous checkpoint or the new one can be opened.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from weft.checkpoint import store
from weft.checkpoint.entry import JSON, CheckpointError, Piece, RankFile, rank_file_name, told
from weft.checkpoint.place import Place
from weft.checkpoint.rank_file import write_pieces
from weft.checkpoint.remote.draft import RemoteDraft
from weft.checkpoint.remote.owner import Owner
from weft.checkpoint.remote.path import RemotePath


class Draft(Protocol):
    """What is written of one save. Raises CheckpointError where the storage refuses."""

    look_s: float
    """How often to look for what other machines write."""

    def begin(self) -> None:
        """Clear what killed saves left. Others write only after it has returned."""

    def is_open(self) -> bool:
        """Somebody has begun it."""

    def write(
        self, rank: int, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
    ) -> RankFile:
        """Write the boxes that a rank owns; as ``write_pieces``."""

    def hold(self, rank: int, beat: int) -> None:
        """Tell whoever commits that what a rank's file is made of is there, and its agent at work.

        ``beat``: another one each time. Nobody says so once it has left what became of it.
        """

    def held(self, rank: int) -> int | None:
        """The last ``beat``; None where nobody has said so."""

    def leave(self, rank: int, facts: Mapping[str, JSON]) -> None:
        """Tell whoever commits what became of a rank's file."""

    def left(self, rank: int) -> dict[str, JSON] | None:
        """What was left; None where there is nothing yet."""

    def commit(self, rank_files: Sequence[RankFile], state: Mapping[str, JSON]) -> Place:
        """Make a checkpoint of what ranks wrote, and the latest one; its folder. Nothing is
        replaced where that cannot be."""

    def abandon(self, *, tells: bool = False) -> None:
        """Remove what was written, when no other writes any more; ``tells``: those who wait for it
        to begin."""

    def is_abandoned(self) -> bool:
        """And whoever did so told it."""


def draft(root: Place, step: int, name: str, owner: Owner | None = None) -> Draft:
    """``name``: of this save alone; an earlier one of the same step may have left files.

    ``owner``: far away, the run that writes. Only whoever begins and commits has to say.
    """
    if isinstance(root, RemotePath):
        return RemoteDraft(root, step, name, owner)
    return LocalDraft(root, step, name)


class LocalDraft:
    """In a folder that gets its name when it is whole."""

    look_s = 0.05

    def __init__(self, root: Path, step: int, name: str) -> None:
        self._root = root
        self._step = step
        self._folder = store.temporary(root, step)
        self._mark = self._folder / f"save-{name}"
        self._end = root / store.abandoned_name(step, name)

    def begin(self) -> None:
        store.begin(self._root, self._step)
        with told("created", self._mark):
            self._mark.touch()

    def is_open(self) -> bool:
        return self._mark.exists()

    def write(
        self, rank: int, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
    ) -> RankFile:
        return write_pieces(self._folder, rank, pieces, data)

    def hold(self, rank: int, beat: int) -> None:
        _put(self._held_by(rank), beat)

    def held(self, rank: int) -> int | None:
        beat: int | None = _got(self._held_by(rank))
        return beat

    def leave(self, rank: int, facts: Mapping[str, JSON]) -> None:
        try:
            _put(self._facts_of(rank), facts)
        except CheckpointError:
            with suppress(OSError):
                self._unsaid_by(rank).touch()  # a full disk has a place for a name
            raise

    def left(self, rank: int) -> dict[str, JSON] | None:
        if self._unsaid_by(rank).exists():
            return {"problem": "the storage does not take what became of its file"}
        data: dict[str, JSON] | None = _got(self._facts_of(rank))
        if data is not None:
            self._facts_of(rank).unlink()
            self._held_by(rank).unlink(missing_ok=True)
        return data

    def commit(self, rank_files: Sequence[RankFile], state: Mapping[str, JSON]) -> Path:
        with told("removed", self._mark):
            self._mark.unlink()
        folder = store.commit(self._root, self._step, rank_files, state)
        store.forget_abandoned(self._root)
        return folder

    def abandon(self, *, tells: bool = False) -> None:
        store.abandon(self._root, self._step)
        if tells:
            with suppress(OSError):
                self._end.touch()

    def is_abandoned(self) -> bool:
        return self._end.exists()

    def _facts_of(self, rank: int) -> Path:
        return (self._folder / rank_file_name(rank)).with_suffix(".facts.json")

    def _unsaid_by(self, rank: int) -> Path:
        return (self._folder / rank_file_name(rank)).with_suffix(".unsaid")

    def _held_by(self, rank: int) -> Path:
        return (self._folder / rank_file_name(rank)).with_suffix(".held.json")


def _put(path: Path, data: JSON | Mapping[str, JSON]) -> None:
    """Whole, or not at all."""
    text = path.with_suffix(".tmp")
    with told("written", path):
        text.write_text(json.dumps(data))
        text.replace(path)


def _got(path: Path) -> Any:
    """None where there is nothing yet."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None
