"""Saving: every file is whole and on the disk before a rename gives it its name.

    root/latest                 names the checkpoint to go on from
    root/step-00000100/         a checkpoint: index.json and one file a rank
    root/step-00000200.tmp/     being written, or left by a save that was killed
    root/step-00000100.old/     replaced by a new save of the same step; soon gone

A save is: one rank calls ``begin``; then every rank ``write_rank`` into ``temporary``; then one
rank ``commit`` and ``prune``. Whenever that is killed, the previous checkpoint or the new one can
be opened, and the next ``begin`` clears what was left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.entry import JSON, CheckpointError, RankFile, told
from weft.checkpoint.index import (
    INDEX,
    Index,
    from_text,
    merge,
    problems,
    refuse,
    resolve_inside,
    to_text,
)
from weft.checkpoint.place import Place
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.remote.folder import remove_folder
from weft.checkpoint.remote.path import RemotePath

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_REPLACED = re.compile(r"step-\d{8,18}\.old", re.ASCII)
_LEFTOVER = re.compile(r"step-\d{8,18}(\.old)?\.tmp", re.ASCII)
_ABANDONED = re.compile(r"step-\d{8,18}\.\w*\.abandoned", re.ASCII)
_OLD = ".old"
_TEMPORARY = ".tmp"
_LOOK_S = 0.02
LATER_S = 1e-5
"""A checkpoint that is saved after another is newer by so much at least."""


def step_name(step: int) -> str:
    """``step-00000100``."""
    assert 0 <= step < 10**18, f"step {step}"
    return f"step-{step:08d}"


def abandoned_name(step: int, name: str) -> str:
    """Of the empty file that says that a save was given up, whose name is ``name``."""
    return f"{step_name(step)}.{name}.abandoned"


def forget_abandoned(root: Place) -> None:
    """Nobody waits for saves before one that all have had a part in."""
    with suppress(OSError):  # what is left misleads nobody
        entries: list[Place] = list(root.iterdir())
        for entry in entries:
            if _ABANDONED.fullmatch(entry.name):
                entry.unlink()


def temporary(root: Path, step: int) -> Path:
    """The folder that every rank writes its file of this step into; ``begin`` creates it."""
    return root / (step_name(step) + _TEMPORARY)


def begin(root: Path, step: int) -> Path:
    """Clear what killed saves left and create ``temporary(root, step)``.

    One rank calls it, and the others write only after it has returned.
    """
    folder = temporary(root, step)
    with told("created", folder):
        root.mkdir(parents=True, exist_ok=True)
        clean(root)
        folder.mkdir()
    return folder


def abandon(root: Path, step: int) -> None:
    """Remove what a save has written that failed on some rank: a full disk gets its space back.

    One rank calls it, when no other writes any more.
    """
    shutil.rmtree(temporary(root, step), ignore_errors=True)


def commit(
    root: Path, step: int, rank_files: Sequence[RankFile], state: Mapping[str, JSON]
) -> Path:
    """Make what the ranks wrote the checkpoint of ``step`` and the latest one; its folder.

    Replaces an earlier checkpoint of the same step. ``state`` comes back as it was given, but for
    tuples, which become lists.

    Raises:
        CheckpointError: an element is stored nowhere or twice, a rank's file is not in the folder
            as written, or the disk refuses. Nothing is replaced then.
    """
    folder, final = temporary(root, step), root / step_name(step)
    index = merge(step, rank_files, state, after_all(root))
    refuse(problems(index), folder)
    for facts in rank_files:
        try:
            check_size(folder / facts.file, facts)
        except CheckpointError as error:
            problem = f"{error.problem}. Do all machines see the same folder there?"
            raise CheckpointError(problem, file=error.file) from error
    with told("committed", folder):
        _write_text(folder / INDEX, to_text(index))
        _sync_folder(folder)
        old = final.with_name(final.name + _OLD)
        if final.exists():
            _discard(old)
            final.rename(old)
        folder.rename(final)
        _sync_folder(root)
        draft = root / (LATEST + _TEMPORARY)
        _write_text(draft, final.name + "\n")
        draft.replace(root / LATEST)
        _sync_folder(root)
        _discard(old)
    return final


def after_all(root: Place) -> float:
    """The time, in seconds since 1970; where a clock was set back, just after the checkpoint that
    ``latest`` names, so that what is saved last is the newest."""
    now = time.time()
    with suppress(CheckpointError):
        if name := read_latest(root):
            return max(now, parse_index(root / name).saved_at + LATER_S)
    return now


def prune(root: Place, keep: int) -> list[str]:
    """Remove all but the ``keep`` complete checkpoints that were saved last; the names removed.

    Never removes the one that ``latest`` names, the last finite one, nor one that is damaged: that
    is for a person.
    Raises CheckpointError where the file system refuses.
    """
    removed = superfluous(root, keep)
    with told("removed"):
        for folder in removed:
            _discard(folder)
    return [folder.name for folder in removed]


def superfluous(root: Place, keep: int) -> list[Place]:
    """What ``prune`` removes: complete checkpoints, by time."""
    assert keep >= 1, f"keep {keep}"
    saved = [(index.saved_at, index.step, folder) for folder, index in complete(root)]
    saved.sort(key=_age)
    finite = last_finite(root)
    kept = {read_latest(root), finite and finite.name}
    return [folder for _, _, folder in saved[:-keep] if folder.name not in kept]


def last_finite(root: Place) -> Place | None:
    """The complete checkpoint without values that are no numbers that was saved last."""
    saved = [
        (index.saved_at, index.step, folder) for folder, index in complete(root) if index.is_finite
    ]
    return max(saved, key=_age)[-1] if saved else None


def _age(saved: tuple[float, int, Place]) -> tuple[float, int]:
    return saved[:2]


def hold(root: Path) -> int:
    """An open folder of checkpoints that tells others that somebody writes into it.

    Until the last process that holds it has closed it or ended. Where the file system knows no
    locks nobody is told.

    Raises OSError where the folder cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def is_free(root: Path, timeout_s: float) -> bool:
    """Nobody ``hold``s the folder any more; waits for that as long as it may take."""
    deadline = time.monotonic() + timeout_s
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # there is none
    try:
        while _is_held(handle):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
    finally:
        os.close(handle)
    return True


def _is_held(handle: int) -> bool:
    """Somebody else has an open folder locked, as far as its file system knows."""
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def clean(root: Path) -> None:
    """Remove what killed saves left; bring back a checkpoint whose replacement never came.

    Not while another process saves into this root.
    """
    for entry in sorted(root.iterdir()):
        if entry.name == LATEST + _TEMPORARY:
            entry.unlink()
        elif _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)
    for folder in candidates(root):
        if isinstance(folder, Path) and folder.name.endswith(_OLD):
            folder.rename(folder.with_name(folder.name.removesuffix(_OLD)))
    for entry in sorted(root.iterdir()):
        if _REPLACED.fullmatch(entry.name):
            _discard(entry)


def candidates(root: Place) -> list[Place]:
    """Folders that ought to be checkpoints, by step; one under its old name if that is all.

    Far away, where a folder has its name from the beginning, those that have an index.
    """
    found: dict[str, Place] = {}
    with told("read", root):
        entries: list[Place] = sorted(root.iterdir(), key=lambda entry: entry.name)
        for entry in entries:
            name = entry.name.removesuffix(_OLD)
            if _STEP.fullmatch(name) and _may_count(entry):
                found.setdefault(name, entry)  # the old name sorts after the new one
    return sorted(found.values(), key=lambda folder: (folder_step(folder), folder.name))


def _may_count(folder: Place) -> bool:
    return folder.is_dir() if isinstance(folder, Path) else (folder / INDEX).is_file()


def folder_step(folder: Place) -> int:
    """The step in a checkpoint folder's name; -1 if it has another name."""
    match = _STEP.fullmatch(folder.name.removesuffix(_OLD))
    return int(match[1]) if match else -1


def complete(root: Place) -> list[tuple[Place, Index]]:
    """Checkpoints that have a sound index and files of the right sizes, by step."""
    found = []
    for folder in candidates(root):
        try:
            found.append((folder, read_index(folder)))
        except CheckpointError:
            continue
    return found


def read_index(folder: Place) -> Index:
    """The index of a checkpoint whose files are all there with the sizes that were written.

    Raises CheckpointError otherwise. Contents of files are not read; ``verify`` does that.
    """
    index = parse_index(folder)
    path = folder / INDEX
    refuse(problems(index), path)
    for file, facts in index.files.items():
        check_size(resolve_inside(folder, file), facts)
    return index


def parse_index(folder: Place) -> Index:
    """The index as it stands, whatever it says. Raises CheckpointError if it is none."""
    path = resolve_inside(folder, INDEX)
    with told("read", path):
        if not path.is_file():
            raise CheckpointError("is missing", file=path)
        data = path.read_bytes()
    index = from_text(data, path)
    if folder_step(folder) not in (-1, index.step):
        raise CheckpointError(f"says step {index.step}", file=path)
    return index


def read_latest(root: Place) -> str | None:
    """The folder name in ``latest``; None where there is no such file or it holds no such name."""
    path = root / LATEST
    with told("read", path):
        if not path.is_file():
            return None
        text = path.read_bytes()[:64].decode(errors="replace").strip()
    return text if _STEP.fullmatch(text) else None


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _discard(folder: Place) -> None:
    """Remove a checkpoint, if it exists, under a name that is not a checkpoint's."""
    if isinstance(folder, RemotePath):
        remove_folder(folder)
    elif folder.exists():
        doomed = folder.with_name(folder.name + _TEMPORARY)
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call
            raise
    finally:
        os.close(handle)
