"""Going on with a run folder: which values of its configuration may differ, and which may not."""

from __future__ import annotations

from pathlib import Path

from weft.config.check import flat
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import load_config
from weft.config.sections import Config

CONFIG_FILE = "config.yaml"

_FIXED = ("seed", "model", "data", "batch.samples")
"""What decides which numbers a run computes: the model, its start, and what each step reads."""
_FREE = ("data.workers", "data.prefetch", "data.cache_dir")
"""Parts of those that do not."""


def changes(out: Path, config: Config) -> list[str]:
    """What differs from the run in ``out``, in words; empty for a new or an unchanged run.

    Raises:
        ConfigErrors: something differs that would make it another run.
    """
    saved = out / CONFIG_FILE
    if not saved.exists():
        return []
    before, now = dict(flat(load_config(str(saved)).config)), dict(flat(config))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    fixed = [key for key in differing if _is_fixed(key)]
    if fixed:
        hint = f"The run in {out} began so. Use another --out for another run."
        raise ConfigErrors(
            ConfigError(key, now.get(key), f"{before.get(key)!r}", hint) for key in fixed
        )
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in differing if key != "name"]


def _is_fixed(key: str) -> bool:
    within = any(key == part or key.startswith(f"{part}.") for part in _FIXED)
    return within and key not in _FREE


def saved_step(out: Path) -> int:
    """Steps done by the newest checkpoint of a run folder; 0 if it has none."""
    latest = out / "checkpoints" / "latest"
    if not latest.is_file():
        return 0
    name = latest.read_text(errors="replace").strip()
    number = name.removeprefix("step-")
    return int(number) if number.isdecimal() else 0
