"""Verification: read every byte, and say in words what is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from weft.checkpoint.entry import CheckpointError, RankFile, told
from weft.checkpoint.index import INDEX, Index, problems, resolve_inside
from weft.checkpoint.place import Place, chunks_of
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.reader import checkpoints_root, is_checkpoint, open_file
from weft.checkpoint.store import (
    LATEST,
    candidates,
    folder_step,
    parse_index,
    read_latest,
    step_name,
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``verify`` found. ``files`` and ``bytes`` count the rank files that were read."""

    ok: bool
    files: int
    bytes: int
    problems: list[str]


def verify(path: Place) -> Verification:
    """Check one checkpoint, or every one in a folder of them or of a run.

    Reads every file whole and compares sizes and checksums; checks that files and index agree
    and that every element of every tensor is stored exactly once. Damage is listed, not raised.
    """
    found: list[str] = []
    try:
        folders = [path] if is_checkpoint(path) else candidates(checkpoints_root(path))
    except (CheckpointError, OSError) as error:
        return Verification(False, 0, 0, [str(error)])
    if not folders:
        found.append(f"{path}: no checkpoint here")
    if not is_checkpoint(path):
        found += _latest_problems(checkpoints_root(path), folders)
    sizes: list[int] = []
    for folder in folders:
        found += _checkpoint_problems(folder, sizes)
    return Verification(not found, len(sizes), sum(sizes), found)


def _latest_problems(root: Place, folders: Sequence[Place]) -> list[str]:
    """A missing ``latest`` is no damage: the first save was killed just before it wrote that."""
    named = read_latest(root)
    if not (root / LATEST).exists() or named in [step_name(folder_step(f)) for f in folders]:
        return []
    return [f"{root / LATEST}: names no checkpoint that is here ({named or 'not a step'})"]


def _checkpoint_problems(folder: Place, sizes: list[int]) -> list[str]:
    """Problems of one checkpoint; the size of every file that was read is added to ``sizes``."""
    try:
        index = parse_index(folder)
    except CheckpointError as error:
        return [str(error)]
    found = [f"{folder / INDEX}: {problem}" for problem in problems(index)]
    for facts in index.files.values():
        try:
            sizes.append(_hash_file(folder, facts))
            found += _content_problems(folder, index, facts)
        except CheckpointError as error:
            found.append(str(error))
    names = {path.name for path in folder.iterdir() if path.name.endswith(".safetensors")}
    unlisted = names - set(index.files)
    found += [f"{folder / name}: is not in the index" for name in sorted(unlisted)]
    return found


def _hash_file(folder: Place, facts: RankFile) -> int:
    """The size of the file. Raises CheckpointError unless its bytes are those that were written."""
    path = resolve_inside(folder, facts.file)
    check_size(path, facts)
    digest = hashlib.sha256()
    with told("read", path):
        for chunk in chunks_of(path):
            digest.update(chunk)
    if digest.hexdigest() != facts.sha256:
        raise CheckpointError("the bytes are not those that were written (sha256)", file=path)
    return facts.bytes


def _content_problems(folder: Place, index: Index, facts: RankFile) -> list[str]:
    """Where a file and the index disagree about the boxes in the file."""
    reader = open_file(folder, facts)
    found: list[str] = []
    listed: set[str] = set()
    for tensor in index.tensors.values():
        for stored in (stored for stored in tensor.boxes if stored.file == facts.file):
            listed.add(tensor.key(stored))
            try:
                reader.check_box(tensor, stored)
            except CheckpointError as error:
                found.append(str(error))
    unlisted = sorted(set(reader.keys()) - listed)
    return found + [f"{folder / facts.file}: {key}: is not in the index" for key in unlisted]
