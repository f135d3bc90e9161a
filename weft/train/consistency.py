"""Ranks that are to train together must agree: on the code, what was asked, and what they see."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from weft import version
from weft.comm.comm import Comm
from weft.config.check import flat
from weft.config.errors import ConfigError, RunError, show
from weft.train.job import Job

_FOLDER = Path(version.__file__).parent


def refuse_unlike_ranks(comm: Comm, job: Job) -> None:
    """Every rank must run the same code on the same configuration and plan.

    Raises:
        ConfigError: the first thing in which a rank differs from rank 0; on every rank.
    """
    everyone = comm.gather_json(_facts(job), name="compare ranks")
    for rank, facts in enumerate(everyone):
        for what in {**everyone[0], **facts}:
            value, first = facts.get(what), everyone[0].get(what)
            if value != first:
                hint = f"Rank {rank} differs. Start the same command, with the same files, "
                hint += "on every machine."
                raise ConfigError(what, value, f"{show(first)}, as on rank 0", hint)


def _facts(job: Job) -> Mapping[str, object]:
    """What must be the same, by the name that a message gives it; the likeliest cause first."""
    facts: dict[str, object] = {
        "weft version": version.__version__,
        "torch version": torch.__version__,
        "weft's source": _source(),
    }
    facts |= flat(job.config)
    facts["--steps"] = job.last_step
    for p, s, stage in job.plan.stages():
        facts[f"pipelines[{p}].stages[{s}]"] = str(asdict(stage))
    for p, pipeline in enumerate(job.plan.pipelines):
        taken = {"samples": pipeline.samples, "microbatch": pipeline.microbatch}
        facts[f"pipelines[{p}]"] = str({**taken, "schedule": pipeline.schedule})
    return facts


def _source() -> str:
    """A few letters that another version of any file of Weft would change."""
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.rglob("*.py")):
        digest.update(str(path.relative_to(_FOLDER)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def refuse_unlike_files(comm: Comm, first_step: int, fingerprint: str) -> None:
    """Ranks that see other checkpoints or other data must not train together.

    Raises:
        RunError: names what differs and where, on every rank.
    """
    mine = {"checkpoint": f"step {first_step}", "data": fingerprint}
    everyone = comm.gather_json(mine, name="compare files")
    for rank, facts in enumerate(everyone):
        for what, value in facts.items():
            if value != everyone[0][what]:
                theirs = f"rank {rank} sees {value}, rank 0 {everyone[0][what]}"
                raise RunError(f"the machines of this job see different {what}: {theirs}")
