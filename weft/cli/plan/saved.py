"""``weft plan --out`` and ``--launch``: the plan in a file, and the commands that run that file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.cli.output import err
from weft.cli.plan.forecasts import Answer
from weft.cli.plan.launch import Launch, launch_of_lab, launch_of_nodes
from weft.cli.target import named
from weft.cluster.cluster_file import read_file
from weft.config.errors import ConfigError
from weft.resolve.overruled import DECIDED_BY_PLAN
from weft.train.run_folder import write_text

SUFFIXES = ".sbatch", ".jobset.yaml"
"""Of what is started by Slurm, and by Kubernetes."""


@dataclass(frozen=True, slots=True)
class Started:
    """What ``weft plan`` was started with."""

    target: str
    overrides: Sequence[str]
    cluster: Path | None


def save(found: Answer, file: Path, made: Launch | None, *, kubernetes: bool = False) -> None:
    """Write the plan, and beside it a file for ``sbatch`` or Kubernetes where it is started so."""
    write(file, json.dumps(found.file.to_data(), indent=2) + "\n")
    text = made and (made.jobset if kubernetes else made.sbatch)
    if text:
        write(file.with_suffix(SUFFIXES[kubernetes]), text)


def write(file: Path, text: str) -> None:
    """All of it or nothing, and say so; where it is a link, what that names."""
    write_text(file.resolve(), text)
    err.print(f"wrote {file}")


def launch_of(found: Answer, file: Path, by: Started) -> Launch:
    """How the plan in this file is started.

    Raises:
        ConfigError: it cannot be.
    """
    if found.outlook is not None and found.outlook.not_run:
        expected = "a plan that this version can run"
        raise ConfigError("--launch", True, expected, " ".join(found.outlook.not_run))
    recipe, pairs = named(by.target, by.overrides)
    kept = [pair for pair in pairs if not _is_decided(pair)]
    train = ["weft", "train", recipe, *kept, *found.vocabulary, f"plan.file={file}"]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("-") or "plan"
    train += ["--out", f"runs/{name}"]
    lab = None if by.cluster is None else read_file(by.cluster)
    if lab is not None and lab.hosts:
        return launch_of_lab(str(by.cluster), train, found.file, lab.world_size)
    return launch_of_nodes(name, train, found.file)


def _is_decided(pair: str) -> bool:
    """The plan's file says it."""
    key = pair.partition("=")[0]
    return key == "plan" or key.startswith("plan.") or key in DECIDED_BY_PLAN
