"""What a plan must be like where experts are kept elsewhere than on the device."""

from __future__ import annotations

from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.models.registry import param_specs
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, StagePlan
from weft.precision.roles import TIERS


def check_expert_tiers(plan: Plan) -> None:
    """
    Raises:
        ConfigError: a stage cannot keep its experts where it says.
    """
    for p, s, stage in plan.stages():
        where = f"pipelines[{p}].stages[{s}]"
        if stage.expert_tier not in TIERS:
            expected = f"one of {', '.join(map(repr, TIERS))}"
            raise ConfigError(f"{where}.expert_tier", stage.expert_tier, expected)
        _check_layers(f"{where}.expert_layers", stage)
        if stage.expert_tier != "device":
            _check_apart(plan, stage, f"{where}.expert_tier")
    for p, pipeline in enumerate(plan.pipelines):
        for numbers in pipeline.positions():
            stages = [pipeline.stages[number] for number in numbers]
            said = sorted({(stage.expert_tier, stage.expert_layers) for stage in stages})
            if len(said) > 1:
                expected = "one expert_tier and expert_layers for all stages of a mesh"
                raise ConfigError(f"pipelines[{p}].stages", said, expected)


def _check_layers(key: str, stage: StagePlan) -> None:
    if type(stage.expert_layers) is not int or stage.expert_layers < 2:
        hint = "The experts of one layer compute while those of the next one come."
        raise ConfigError(key, stage.expert_layers, "a whole number of at least 2", hint)
    if stage.expert_layers != 2 and stage.expert_tier == "device":
        hint = "expert_tier=host or disk keeps experts elsewhere."
        raise ConfigError(key, stage.expert_layers, "2 where experts are on the device", hint)


def _check_apart(plan: Plan, stage: StagePlan, key: str) -> None:
    tier = stage.expert_tier
    if tier == "host" and stage.device == HOST:
        hint = "A processor's memory is the host's: nothing would be gained."
        raise ConfigError(key, tier, "device or disk", hint)
    if plan.domains or plan.sites:
        what = "domains" if plan.domains else "sites"
        hint = "What is summed between them is on the device."
        raise ConfigError(key, tier, f"device beside {what}", hint)
    if len(plan.pipelines) > 1:
        hint = "Each layer's experts come to all that hold them at the same time, and pipelines "
        hint += "compute at their own: plan.stages=[{ep: 2}] divides samples inside one."
        raise ConfigError(key, tier, "device beside other pipelines", hint)


def refuse_idle_expert_tiers(plan: Plan, spec: ModelSpec, *, by_element: bool) -> None:
    """
    Raises:
        ConfigError: a stage keeps experts elsewhere that it does not have, or that its optimizer
            cannot take in pieces.
    """
    with_experts = {param.unit for param in param_specs(spec) if param.of_experts}
    for p, s, stage in plan.stages():
        key = f"pipelines[{p}].stages[{s}].expert_tier"
        if stage.expert_tier == "device":
            continue
        if not with_experts:
            hint = "state_tier and param_tier keep what other models have elsewhere."
            raise ConfigError(key, stage.expert_tier, "device for a model without experts", hint)
        if not by_element:
            hint = "It looks at whole tensors; adamw and sgd take experts in pieces."
            raise ConfigError(key, stage.expert_tier, "device with this optimizer", hint)
