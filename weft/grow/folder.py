"""The folder of a grown model: a run at step 0, with a configuration to go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.checkpoint.entry import told
from weft.checkpoint.place import CONFIG_FILE, FOLDER
from weft.checkpoint.reader import Checkpoint
from weft.config.load import said_by
from weft.config.tree import dump
from weft.data.cache import TOKENIZER_FILE
from weft.data.tokenizer import copy_tokenizer
from weft.grow.groups import groups_of
from weft.grow.growth import Growth
from weft.grow.write import Written, write_grown
from weft.models.config_folder import section_of


@dataclass(frozen=True, slots=True)
class Grown:
    """What was written."""

    written: Written
    has_tokenizer: bool
    has_config: bool
    """Its configuration says all that the old run's did, and not the model alone."""


def write_folder(
    checkpoint: Checkpoint,
    growth: Growth,
    out: Path,
    *,
    config_name: str,
    seed: int,
    keep_moments: bool,
    report: Callable[[int, int], None],
) -> Grown:
    """Write ``out``: it is there as a whole, or not at all. Arguments as of ``write_grown``.

    Its configuration begins with the grown weights whatever ``--out`` it is trained in.

    Raises:
        CheckpointError: as there.
        ConfigErrors: the old run's configuration cannot be read.
    """
    said = _config(checkpoint, config_name)
    has_config = "batch" in said
    said["model"] = section_of(growth.new)
    if groups := (said.get("optim") or {}).get("groups"):
        said["optim"] = {**said["optim"], "groups": groups_of(groups, growth)}
    said["checkpoint"] = {**said.get("checkpoint", {}), "load": str(out.absolute())}
    begun = out.absolute().with_name(f".{out.name}.growing")  # a killed one left it
    with told("written", begun):
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        tokenizer = None if checkpoint.run is None else checkpoint.run / TOKENIZER_FILE
        has_tokenizer = tokenizer is not None and tokenizer.is_file()
        if tokenizer is not None and has_tokenizer:
            copy_tokenizer(tokenizer, begun)
            said["data"] = {
                **said.get("data", {}),
                "tokenizer": str(out.absolute() / TOKENIZER_FILE),
            }
        text = f"# Grown from {checkpoint.folder}\n{dump(said)}"
        (begun / config_name).write_text(text, encoding="utf-8")
    written = write_grown(
        checkpoint,
        growth,
        begun / FOLDER,
        seed=seed,
        keep_moments=keep_moments,
        report=report,
    )
    with told("written", out):
        begun.rename(out)
    place = out / FOLDER / written.place.name
    return Grown(replace(written, place=place), has_tokenizer, has_config)


def _config(checkpoint: Checkpoint, grown_name: str) -> dict[str, Any]:
    """What the old run's says of text, batch, learning rate and plan, or that of a model that grew
    and did not train; empty where there is neither."""
    if checkpoint.run is None:
        return {}
    paths = [checkpoint.run / name for name in (CONFIG_FILE, grown_name)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return {}
    said = said_by(path)
    said.pop("name", None)
    beginning: dict[str, Any] = {
        **said.get("checkpoint", {}),
        "allow_missing": [],
        "allow_resized": [],
        "allow_unused": [],
    }
    return {**said, "init": None, "checkpoint": beginning}
