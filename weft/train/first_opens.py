"""Rank 0 finds a checkpoint and looks at its files; the others have the index from there.

So storage is asked for every file once, and not by every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.index import INDEX, from_text, to_text
from weft.checkpoint.place import Place, place_of
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.checkpoint.remote.path import RemotePath
from weft.comm.comm import Comm
from weft.comm.heartbeat import with_heartbeat

NAME = "checkpoint to go on from"


def opened_by_first(comm: Comm, place: Place) -> Checkpoint:
    """As ``open_checkpoint``, on every rank. Collective."""
    found = found_by_first(comm, place, open_checkpoint)
    assert found is not None, f"opened, or an error: {place}"
    return found


def found_by_first(
    comm: Comm, place: Place, find: Callable[[Place], Checkpoint | None]
) -> Checkpoint | None:
    """What rank 0 finds in a place, on every rank. Collective.

    Raises:
        CheckpointError: what rank 0 says of it; on every rank.
    """
    mine: Checkpoint | None = None

    def told() -> dict[str, Any]:
        nonlocal mine
        if comm.rank:
            return {}
        try:
            mine = find(place)
        except CheckpointError as error:
            file = None if error.file is None else str(error.file)
            return {"problem": error.problem, "file": file, "tensor": error.tensor}
        return {} if mine is None else _facts(mine, place)

    # Where storage is far away an answer may take longer than ranks wait for one another.
    is_far = isinstance(place, RemotePath)
    facts = with_heartbeat(comm, told, name=NAME) if is_far else told()
    first = comm.gather_json(facts, name=NAME)[0]
    if "problem" in first:
        raise CheckpointError(first["problem"], file=first["file"], tensor=first["tensor"])
    if comm.rank and first:
        return _from_facts(first, place)
    return mine


def _facts(checkpoint: Checkpoint, place: Place) -> dict[str, Any]:
    folder = checkpoint.folder
    return {
        "name": folder.name if folder.parent == place else None,
        "at": str(folder),
        "index": to_text(checkpoint.index),
        "notes": checkpoint.notes,
    }


def _from_facts(facts: dict[str, Any], place: Place) -> Checkpoint:
    """Machines may have one folder under several names: what is inside it has one."""
    folder = place / facts["name"] if facts["name"] else place_of(facts["at"])
    return Checkpoint(folder, from_text(facts["index"], folder / INDEX), tuple(facts["notes"]))
