"""Whose checkpoints lie in a place that a configuration names: of two runs that shared one, each
would go on from what the other has saved.

    root/run.json    the run folder that saves there
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.entry import CheckpointError, told
from weft.checkpoint.place import FOLDER, KEY, Place, checkpoints_of
from weft.config.errors import ConfigError

RUN_FILE = "run.json"


def refuse_other(root: Place, out: Path) -> str:
    """A sentence where the checkpoints are of a run folder that is no more, or saves elsewhere by
    now; empty where they are this one's, or nobody's.

    Raises:
        ConfigError: another run folder saves there.
        CheckpointError: the storage does not answer.
    """
    other = None if root == out / FOLDER else _said(root)
    if other is None or other == out.resolve() or _are_one(other, out):
        return ""
    if _saves_to(other, root):
        hint = (
            f"The run in {other} saves there: go on with --out {other}, or name another place; "
            "{run} in it is the name of the run's folder."
        )
        raise ConfigError(KEY, str(root), "a place of its own for each run", hint)
    return f"the checkpoints in {root} were begun by the run in {other}, which does not save there"


def claim(root: Place, out: Path) -> None:
    """Say that they are this run's. Where that cannot be written nobody is told.

    Raises ConfigError where another run folder has said so since ``refuse_other`` looked.
    """
    if root == out / FOLDER or _said(root) == out.resolve():
        return
    is_over, text = bool(refuse_other(root, out)), json.dumps({"run": str(out.resolve())})
    with suppress(OSError, CheckpointError):
        if not isinstance(root, Path):
            (root / RUN_FILE).write_bytes(text.encode())
            return
        root.mkdir(parents=True, exist_ok=True)
        if is_over:
            (root / RUN_FILE).unlink(missing_ok=True)
        with (root / RUN_FILE).open("x", encoding="utf-8") as file:  # once, of two at a time
            file.write(text)
    refuse_other(root, out)


def run_of(root: Place) -> Path | None:
    """The folder of the run whose checkpoints lie there; None: it is no more, or nobody knows.

    Raises CheckpointError where the storage does not answer.
    """
    said = _said(root)
    if said is None and isinstance(root, Path) and root.absolute().name == FOLDER:
        said = root.absolute().parent if root.name != FOLDER else root.parent
    return said if said is not None and said.is_dir() else None


def _said(root: Place) -> Path | None:
    """None where nobody said so."""
    path = root / RUN_FILE
    with told("read", path):
        try:
            return Path(json.loads(path.read_bytes())["run"])
        except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
            return None


def _are_one(other: Path, out: Path) -> bool:
    """Two names of one folder, as two mounts of it have them."""
    with suppress(OSError):
        return other.samefile(out)
    return False


def _saves_to(run: Path, root: Place) -> bool:
    """It is a run folder still, whose checkpoints lie there."""
    with suppress(ConfigError):
        place = checkpoints_of(run)
        same = [each.resolve() if isinstance(each, Path) else each for each in (place, root)]
        return same[0] == same[1]
    return False
