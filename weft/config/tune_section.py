"""The section ``tune``: among what ``weft tune`` chooses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.open_fields import OneOf
from weft.config.plan_sections import Cast
from weft.config.values import Count, Section

_Recompute = Annotated[str, OneOf("recompute", "auto", joins=True)]
_Schedule = Annotated[str, OneOf("schedules")]
Layout = Literal["any", "one-stage", "one-pipeline"]


class TuneConfig(Section):
    """What `weft tune` asks the planner about: for each combination its best plans, and the next
    best that are really different, are what is tried. Layers, samples and chips of stages are
    always the planner's. What `batch.micro`, `plan.schedule` and `compute.recompute` say is kept
    to. `weft train` does not read this section."""

    micros: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Samples of a micro-batch that a rank may have; null: 1, 2, 4 and 8, or `batch.micro`."""
    recompute: Annotated[tuple[_Recompute, ...], Field(min_length=1)] | None = None
    """What may be computed again in backward; "auto" is as far as memory asks. null: "auto" and,
    where memory rules some plan out, "full"; or `compute.recompute`."""
    schedules: Annotated[tuple[_Schedule, ...], Field(min_length=1)] | None = None
    """Schedules of pipelines, each asked about by itself; null: whichever the planner takes, or
    `plan.schedule`."""
    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = (
        "any",
        "one-stage",
        "one-pipeline",
    )
    """How chips may be laid out: without stages, as one pipeline, or in any way."""
    borders: Annotated[tuple[Cast | None, ...], Field(min_length=1)] = (None,)
    """Casts of what goes over borders between stages, as `plan.border`; numbers depend on them, so
    that null alone is usual."""
    pieces: Annotated[tuple[Count, ...], Field(min_length=1)] = (1,)
    """Pieces of what ranks gather and sum inside layers, as `pieces` of a stage."""
    plans: Count = 40
    """Most plans to choose trials from, the fastest by prediction."""
