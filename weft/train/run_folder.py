"""A run's folder: one command at a time works in it, and a refused one leaves nothing behind.

A later start goes on with what is there: some values of its configuration may differ then.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.checkpoint.place import checkpoints_of
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.store import folder_step, read_latest
from weft.config.check import flat
from weft.config.errors import ConfigError, ConfigErrors, show
from weft.config.load import load_config
from weft.config.optim_sections import OptimConfig, ParamGroupConfig
from weft.config.sections import Config

LOGS = "logs"
"""In the run folder: what ranks print."""
SUMMARY_FILE = "summary.json"
"""In the run folder, written after the last step: what ``report`` and commands show."""
REWINDS_FILE = "rewinds.json"
"""In the run folder, once a run went back."""
CONFIG_FILE = "config.yaml"
NODES_FILE = ".nodes.json"
"""In the run folder, as long as a command there guides those of other machines; nobody but its
owner may read it."""
LAUNCHER_FILE = ".launcher"
"""In the run folder, while a process that can move its job works there."""
PACES_FILE = ".paces.json"
"""In the run folder: a step, how long each rank was to compute in one, and how many times as long
it does, where that is new and the launcher is to plan again."""

_FIXED = ("seed.", "model.", "data.", "batch.samples.")
"""What decides which numbers a run computes: the model, its start, and what each step reads."""
_FREE = ("data.workers", "data.prefetch", "data.cache_dir")
"""Parts of those that do not."""
GROUPS = "optim.groups"


class RunFolder:
    """Holds a run's folder while a command works in it. A context manager.

    Creates the folder, and on leaving removes what it created and nobody put anything into. Where
    the file system knows no locks, two commands are not kept apart.

    Raises:
        ConfigError: the folder cannot be created or written, or another command holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []
        self._handle = -1
        self._had_logs = (path / LOGS).exists()

    def __enter__(self) -> RunFolder:
        hint = "Choose another folder with --out."
        try:
            self._create()
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            self._remove_empty()
            expected = "a folder that can be written"
            raise ConfigError("--out", str(self.path), expected, hint) from error
        if not self._lock():
            os.close(self._handle)
            expected = "a folder that no other command is working in"
            raise ConfigError("--out", str(self.path), expected, f"{hint[:-1]}, or wait.")
        with suppress(OSError):  # of one that was killed
            (self.path / LAUNCHER_FILE).unlink(missing_ok=True)
            (self.path / NODES_FILE).unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_empty()
        os.close(self._handle)

    def _lock(self) -> bool:
        """False where another command holds the folder for more than the moment of a look at it."""
        for wait_s in (0.05, 0.2, 0.0):
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(wait_s)
            except OSError:
                return True  # a network file system without locks
            else:
                return True
        return False

    def drop_new_logs(self) -> None:
        """The ranks refused to begin: leave none of their logs where there were none before.

        Under a launcher another rank may have been here first, so a folder of logs alone is new.
        """
        is_new = all(entry.name == LOGS for entry in self.path.iterdir())
        if is_new or not self._had_logs:
            shutil.rmtree(self.path / LOGS, ignore_errors=True)
        if is_new and not self._made:
            self._made.append(self.path)

    def _create(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written")

    def _remove_empty(self) -> None:
        with suppress(OSError):  # the first that is not empty, or was removed by somebody else
            for folder in reversed(self._made):
                folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Give a file a new content at once: whoever reads it sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def changes(out: Path, config: Config) -> list[str]:
    """What differs from the last start of the run in ``out``, in words; empty for a new run.

    Raises:
        ConfigErrors: something differs that would make it another run.
        ConfigError: the run's own configuration cannot be read.
    """
    saved = out / CONFIG_FILE
    if not saved.exists():
        return []
    began = _saved_config(saved)
    before, now = dict(flat(began)), dict(flat(config))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    fixed = [key for key in differing if key not in _FREE and f"{key}.".startswith(_FIXED)]
    kept = [f"optim.{key}" for key in config.optim.lacks(began.optim)]
    if _up_to_frozen(began.optim) != _up_to_frozen(config.optim):
        kept.append(GROUPS)
    fixed = [*fixed, *kept]
    before[GROUPS], now[GROUPS] = (_said(each.optim.groups) for each in (began, config))
    if fixed:
        hint = f"The run in {out} began so. Use another --out for another run."
        if kept:
            hint = f"{hint[:-1]}, and checkpoint.load to begin it with these weights."
        raise ConfigErrors(
            ConfigError(key, now.get(key), show(before.get(key)), hint) for key in fixed
        )
    return [
        f"{key}: {show(before.get(key))} -> {show(now.get(key))}"
        for key in differing
        if key != "name"
    ]


def _said(groups: Sequence[ParamGroupConfig]) -> list[dict[str, Any]]:
    """As a file says them."""
    return [group.model_dump(mode="json", exclude_defaults=True) for group in groups]


def _up_to_frozen(optim: OptimConfig) -> list[tuple[str, int | None, bool]]:
    """What decides which parameters are not trained: a parameter is of the first group it fits."""
    parts = [(each.params, each.narrower_than, each.trainable) for each in optim.groups]
    while parts and parts[-1][-1]:
        parts.pop()
    return parts


def _saved_config(file: Path) -> Config:
    try:
        return load_config(str(file)).config
    except ConfigErrors as errors:
        first = errors.errors[0]
        problem = f"{first} ({first.where})" if first.where else str(first)
        hint = f"In {file.name}: {problem} Put that file right, or use another --out."
        expected = "a run folder whose configuration can be read"
        raise ConfigError("--out", str(file.parent), expected, hint) from errors


def saved_step(out: Path) -> int:
    """Steps done by the checkpoint that a run folder goes on from; 0 if it has none.

    Looks at names and sizes: whether contents are sound is found out when they are read.

    Raises CheckpointError where they lie far away, and nobody answers there.
    """
    steps, place = _whole_steps(out), checkpoints_of(out)
    if isinstance(place, RemotePath):
        return max(steps.values(), default=0)
    latest = place / "latest"
    named = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    return steps.get(named, max(steps.values(), default=0))


def has_saved(out: Path) -> bool:
    """There is a checkpoint in a run folder, maybe of step 0: an import, or ``--init``.

    Raises CheckpointError as ``saved_step``.
    """
    return bool(_whole_steps(out))


def _whole_steps(out: Path) -> dict[str, int]:
    """Steps done, by the name of each checkpoint that is whole; far away, of the latest one."""
    place = checkpoints_of(out)
    if isinstance(place, RemotePath):
        named = read_latest(place)
        return {} if named is None else {named: folder_step(place / named)}
    return {
        folder.name: int(folder.name.removeprefix("step-"))
        for folder in place.glob("step-*[0-9]")
        if folder.name.removeprefix("step-").isdecimal() and _is_whole(folder)
    }


def _is_whole(checkpoint: Path) -> bool:
    """There is an index, and every file that it names has the size that was written."""
    try:
        index = json.loads((checkpoint / "index.json").read_bytes())
        files = {checkpoint / each["file"]: each["bytes"] for each in index.get("files", ())}
        return all(file.stat().st_size == size for file, size in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def saved_summary(out: Path) -> dict[str, Any] | None:
    """What the run came to at the checkpoint it would go on from; None if it ended before that.

    Raises CheckpointError as ``saved_step``.
    """
    summary = summary_of(out)
    return summary if summary and summary.get("step") == saved_step(out) else None


def summary_of(out: Path) -> dict[str, Any]:
    """What the run came to when it last ended, whatever was saved since; empty if it never did."""
    try:
        summary = json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def saved_prompts(out: Path) -> tuple[str, ...]:
    """What the model continued at the end of the run; empty where it has not ended."""
    try:
        samples = json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))["samples"]
        return tuple(str(sample["prompt"]) for sample in samples)
    except (OSError, ValueError, LookupError, TypeError):
        return ()
