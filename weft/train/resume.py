"""Going on with a run folder: which values of its configuration may differ, and which may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.config.check import flat
from weft.config.errors import ConfigError, ConfigErrors, show
from weft.config.load import load_config
from weft.config.sections import Config
from weft.train.job import SUMMARY_FILE

CONFIG_FILE = "config.yaml"

_FIXED = ("seed", "model", "data", "batch.samples")
"""What decides which numbers a run computes: the model, its start, and what each step reads."""
_FREE = ("data.workers", "data.prefetch", "data.cache_dir")
"""Parts of those that do not."""


def changes(out: Path, config: Config) -> list[str]:
    """What differs from the last start of the run in ``out``, in words; empty for a new run.

    Raises:
        ConfigErrors: something differs that would make it another run.
        ConfigError: the run's own configuration cannot be read.
    """
    saved = out / CONFIG_FILE
    if not saved.exists():
        return []
    before, now = dict(flat(_saved_config(saved))), dict(flat(config))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    fixed = [key for key in differing if _is_fixed(key)]
    if fixed:
        hint = f"The run in {out} began so. Use another --out for another run."
        raise ConfigErrors(
            ConfigError(key, now.get(key), show(before.get(key)), hint) for key in fixed
        )
    return [
        f"{key}: {show(before.get(key))} -> {show(now.get(key))}"
        for key in differing
        if key != "name"
    ]


def _saved_config(file: Path) -> Config:
    try:
        return load_config(str(file)).config
    except ConfigErrors as errors:
        first = errors.errors[0]
        problem = f"{first} ({first.where})" if first.where else str(first)
        hint = f"In {file.name}: {problem} Put that file right, or use another --out."
        expected = "a run folder whose configuration can be read"
        raise ConfigError("--out", str(file.parent), expected, hint) from errors


def _is_fixed(key: str) -> bool:
    within = any(key == part or key.startswith(f"{part}.") for part in _FIXED)
    return within and key not in _FREE


def saved_step(out: Path) -> int:
    """Steps done by the checkpoint that a run folder goes on from; 0 if it has none.

    Looks at names alone: whether the files are sound is found out when they are read.
    """
    steps = {
        folder.name: int(folder.name.removeprefix("step-"))
        for folder in (out / "checkpoints").glob("step-*[0-9]")
        if folder.name.removeprefix("step-").isdecimal() and (folder / "index.json").is_file()
    }
    latest = out / "checkpoints" / "latest"
    named = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    return steps.get(named, max(steps.values(), default=0))


def saved_summary(out: Path) -> dict[str, Any] | None:
    """What the run came to at the checkpoint it would go on from; None if it ended before that."""
    try:
        summary = json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    at_step = isinstance(summary, dict) and summary.get("step") == saved_step(out)
    return summary if at_step else None
