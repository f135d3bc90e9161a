"""What stages of a plan say themselves, so that the sections beside it cannot."""

from __future__ import annotations

from weft.config.check import flat
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.plan_sections import PlanConfig
from weft.config.tree import COMMAND_LINE
from weft.planner.stages import pipelines_of

DECIDED_BY_PLAN = (
    "batch.micro",
    "batch.accumulation",
    "compute.device",
    "compute.precision",
    "compute.recompute",
    "compute.activations_gib",
    "compute.compile",
    "optim.state_tier",
    "optim.param_tier",
    "optim.expert_tier",
    "optim.expert_layers",
)
"""What a plan says of every stage, so that a configuration beside it cannot."""


def refuse_without_effect(loaded: Loaded) -> None:
    """What is asked for on the command line must happen.

    Raises:
        ConfigErrors: a value there that the plan overrules: its file, or every one of its stages.
    """
    plan = loaded.config.plan
    if plan.file is not None:
        decided, beside = list(DECIDED_BY_PLAN), "plan.file"
        hint = "The plan's file says it for every stage: change it there."
    else:
        decided, beside = said_by_every_stage(plan), "what every stage says itself"
        hint = "Change it in plan.stages or plan.pipelines."
    values = dict(flat(loaded.config))
    overruled = [key for key in decided if loaded.origins[key] == COMMAND_LINE]
    if overruled:
        expected = f"nothing beside {beside}"
        raise loaded.place(*(ConfigError(key, values[key], expected, hint) for key in overruled))


def said_by_every_stage(plan: PlanConfig) -> list[str]:
    """Keys of what no stage takes from the sections beside the plan."""
    stages = [dict(stage) for p in pipelines_of(plan, (1,)) for stage in p.stages]
    names = ["device", "precision", "recompute", "compile", "state_tier", "param_tier"]
    names += ["expert_tier", "expert_layers"]
    said = [name for name in names if all(stage[name] is not None for stage in stages)]
    return [f"{section_of_stages(name)}.{name}" for name in said]


def section_of_stages(name: str) -> str:
    """The section beside the plan that has a key of stages too."""
    return "optim" if name.endswith(("tier", "layers")) else "compute"
