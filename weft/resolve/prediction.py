"""What a plan will take on the chips of its ranks, and what a run took. No torch.

Time is predicted where the chips are known: from a profile, or from the catalogue. Memory depends
on the plan and the model, and is always predicted.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError, ConfigErrors
from weft.planner.problem import Problem
from weft.report.metrics import StepMetrics
from weft.resolve.rank_chips import (
    CLUSTER_VARIABLE,
    Machine,
    RankChips,
    chips_of_file,
    chips_of_machines,
)
from weft.resolve.resolve import Resolved
from weft.simulate.known import local_profile

PREDICTION_FILE = "prediction.json"
"""In the run folder: the ``Prediction`` of its last start."""
AUTO_FILE = "auto.json"
"""In the run folder: what ``plan.auto`` was asked and chose, which a resume keeps to."""
WARM_UP_STEPS = 2
"""First steps of a start that are left out: memory is allocated and code is met first in them."""
UNMEASURED = "there is no profile for this CPU; run `weft chips profile`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantities:
    """What is known of a run both before and after it. None is not known."""

    step_time_s: float | None = None
    """Of one optimizer step, without evaluations and checkpoints."""
    tokens_per_s: float | None = None
    memory_gib: tuple[float, ...] = ()
    """Most that each rank holds, by rank."""
    sent_mb: float | None = None
    """By all ranks in one step, 10^6 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Before a run."""

    quantities: Quantities = Quantities()
    busy_s: tuple[float, ...] = ()
    """How long each rank computes in a step, by rank; empty where that is not known."""
    basis: tuple[str, ...] = ()
    """Where rates come from, in words."""
    problem: str = ""
    """Why there is no time; empty where there is one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def predict_run(
    resolved: Resolved,
    *,
    ranks_here: int | None = None,
    chips: RankChips | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Prediction:
    """What a run will take whose ranks are on this machine, or on chips that a file describes.

    Args:
        ranks_here: How many of them this machine runs; None: all.
        chips: What is already known of them.
    """
    plan, work = resolved.plan, resolved.workload
    asked = Problem(work, ClusterView(()))
    problem, step_s, sent_mb = "", None, None
    busy_s: tuple[float, ...] = ()
    try:
        chips = chips or chips_of_run(resolved, ranks_here, environment)
        known = replace(chips.knowledge, tf32=resolved.config.compute.tf32)
        asked = Problem(work, chips.view, known)
        sent_mb = sum(asked.sent(plan).values()) / 1e6
        if chips.is_guess:
            problem = UNMEASURED
        else:
            time = asked.time(plan)
            step_s, busy_s = time.step_s, time.busy_s(plan)
    except ConfigErrors as errors:
        problem = str(errors.errors[0])
    except ConfigError as error:
        problem = str(error)
    memory = asked.memory(plan)
    quantities = Quantities(
        step_time_s=step_s,
        tokens_per_s=step_s and plan.global_batch * work.seq_len / step_s,
        memory_gib=tuple(memory[rank].total / 2**30 for rank in sorted(memory)),
        sent_mb=sent_mb,
    )
    basis = chips.basis if chips is not None and not chips.is_guess else ()
    return Prediction(quantities=quantities, busy_s=busy_s, basis=basis, problem=problem)


def chips_of_run(
    resolved: Resolved, ranks_here: int | None, environment: Mapping[str, str] = os.environ
) -> RankChips:
    """What the ranks of a run compute on, as far as this machine knows it.

    Raises:
        ConfigError: it does not, or a profile cannot be read.
    """
    world_size = resolved.plan.world_size
    if file := environment.get(CLUSTER_VARIABLE):
        return chips_of_file(Path(file), resolved.cluster.nodes[0], world_size)
    if ranks_here not in (None, world_size):
        text = f"the chips of other machines are not known, and no {CLUSTER_VARIABLE} says them"
        raise ConfigError("", None, "", text)
    return chips_here(resolved)


def chips_here(resolved: Resolved) -> RankChips:
    """What the ranks of a plan compute on where this machine runs them all.

    Raises:
        ConfigError: it has fewer GPUs than the plan asks for, or a profile cannot be read.
    """
    devices, node, threads = resolved.plan.devices, resolved.cluster.nodes[0], resolved.threads
    machine = Machine(node=node, devices=devices, profile=local_profile(node), threads=threads)
    return chips_of_machines([machine])


def steady(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """Without the first few, where there are more."""
    return steps[WARM_UP_STEPS:] or steps


def median(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None


def measured(
    steps: Sequence[StepMetrics], *, memory_gib: Sequence[float], sent_mb: float
) -> Quantities:
    """What the steps of one start took: medians after the first few."""
    return Quantities(
        step_time_s=median([step.step_time_s for step in steady(steps)]),
        tokens_per_s=median([step.tokens_per_s for step in steady(steps)]),
        memory_gib=tuple(memory_gib),
        sent_mb=sent_mb,
    )


def beside(prediction: Prediction, took: Quantities) -> dict[str, Any]:
    """Both, as ``summary.json`` has them under ``prediction``."""
    return {
        "predicted": asdict(prediction.quantities),
        "measured": asdict(took),
        "basis": list(prediction.basis),
        "problem": prediction.problem,
    }
