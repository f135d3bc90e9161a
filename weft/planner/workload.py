"""What is to be trained: a model, the length of its samples, and how many make a step."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.model import ModelSpec
from weft.plan.plan import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of a training job, before anybody says on which chips."""

    spec: ModelSpec
    seq_len: int
    samples: int
    """Of one step, over the whole job."""
    precision: Precision = "bf16"
