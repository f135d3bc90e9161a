"""A card that ran out of memory, in one sentence, and what to do about it."""

from __future__ import annotations

import torch

from weft.config.errors import RunError
from weft.planner.fit import changes
from weft.train.job import Job


def out_of_memory(
    error: torch.OutOfMemoryError, job: Job, rank: int, device: torch.device
) -> RunError:
    """What a rank says that could not go on; what was saved stays."""
    said = ". ".join(str(error).split("\n")[0].split(". ")[:2]).removesuffix(".")
    predicted = job.prediction.quantities.memory_gib if job.prediction else ()
    need = f" It was predicted to need {predicted[rank]:.1f} GiB." if predicted else ""
    ways = (words for words, changed in changes(job.plan) if changed != job.plan)
    way_out = next(ways, "Take a smaller model, or more machines")
    end = "What was saved stays: the same command goes on from there"
    return RunError(f"{device} has too little memory: {said}.{need} {way_out}. {end}.")
