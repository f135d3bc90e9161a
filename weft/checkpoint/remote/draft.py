"""One save into storage that knows no renaming.

    root/owner.json                                    the run that writes here
    root/latest                                        replaced last
    root/step-00000100/index.json                      without it the rest counts for nothing
    root/step-00000100/rank-00000-NAME.safetensors     NAME: of this save alone

So a checkpoint of the same step stays whole until the index of the new one takes its place, and
whatever a killed save still sends has names that no index lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.checkpoint import store
from weft.checkpoint.entry import JSON, CheckpointError, Piece, RankFile, rank_file_name, told
from weft.checkpoint.index import INDEX, merge, problems, refuse, to_text
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.remote.folder import keep_only, remove_folder
from weft.checkpoint.remote.owner import Owner, refuse_other, take_turn
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.remote.upload import upload


class RemoteDraft:
    """As ``Draft`` says."""

    look_s = 0.5

    def __init__(self, root: RemotePath, step: int, name: str, owner: Owner | None) -> None:
        self._root = root
        self._step = step
        self._name = name
        self._owner = owner
        self._folder = root / store.step_name(step)
        self._mark = self._folder / f"save-{name}"
        self._end = root / store.abandoned_name(step, name)

    def begin(self) -> None:
        if self._owner is not None:
            take_turn(self._root, self._owner)
        with told("cleared", self._root):
            clean(self._root)
        with told("written", self._mark):
            self._mark.write_bytes(b"")

    def is_open(self) -> bool:
        with told("read", self._mark):
            return self._mark.is_file()

    def write(
        self, rank: int, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
    ) -> RankFile:
        return upload(self._folder / rank_file_name(rank, self._name), pieces, data)

    def hold(self, rank: int, beat: int) -> None:
        _put(self._held_by(rank), beat)

    def held(self, rank: int) -> int | None:
        beat: int | None = _got(self._held_by(rank))
        return beat

    def leave(self, rank: int, facts: Mapping[str, JSON]) -> None:
        _put(self._facts_of(rank), facts)

    def left(self, rank: int) -> dict[str, JSON] | None:
        data: dict[str, JSON] | None = _got(self._facts_of(rank))
        return data

    def commit(self, rank_files: Sequence[RankFile], state: Mapping[str, JSON]) -> RemotePath:
        self._refuse_other()  # who clears what it finds: before files are missed
        index = merge(self._step, rank_files, state, store.after_all(self._root))
        refuse(problems(index), self._folder)
        for facts in rank_files:
            check_size(self._folder / facts.file, facts)
        path, text = self._folder / INDEX, to_text(index).encode()
        self._refuse_other()
        with told("written", path):
            path.write_bytes(text)
            if path.read_bytes() != text:
                raise CheckpointError("the storage gives back other bytes", file=path)
        latest = self._root / store.LATEST
        with told("written", latest):
            latest.write_bytes(f"{self._folder.name}\n".encode())
        with suppress(OSError):  # what is left over the next save clears
            keep_only(self._folder, {INDEX, *index.files})
            store.forget_abandoned(self._root)
        return self._folder

    def abandon(self, *, tells: bool = False) -> None:
        with suppress(OSError, CheckpointError):
            self._refuse_other()
            if tells:
                self._end.write_bytes(b"")
            clean(self._root)

    def is_abandoned(self) -> bool:
        with told("read", self._end):
            return self._end.is_file()

    def _refuse_other(self) -> None:
        """Where another run has taken its turn, what is there is not this one's to change."""
        if self._owner is not None:
            refuse_other(self._root, self._owner)

    def _facts_of(self, rank: int) -> RemotePath:
        return self._folder / f"{rank_file_name(rank, self._name)}.facts.json"

    def _held_by(self, rank: int) -> RemotePath:
        return self._folder / f"{rank_file_name(rank, self._name)}.held.json"


def _put(path: RemotePath, data: JSON | Mapping[str, JSON]) -> None:
    with told("written", path):
        path.write_bytes(json.dumps(data).encode())


def _got(path: RemotePath) -> Any:
    """None where there is nothing yet."""
    with told("read", path):
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None


def clean(root: RemotePath) -> None:
    """Remove what killed saves left: files that no index lists, and folders without an index.

    Not while another process saves into this root. Raises OSError where the storage refuses.
    """
    for folder in root.iterdir():
        if store.folder_step(folder) < 0:
            continue
        if not (folder / INDEX).is_file():
            remove_folder(folder)
            continue
        with suppress(CheckpointError):  # a damaged one is for a person
            keep_only(folder, {INDEX, *store.parse_index(folder).files})
