"""Where a run keeps what only updates need: rules between what is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.config.optim_sections import OptimConfig
from weft.config.plan_sections import StageConfig
from weft.config.sections import Config
from weft.memory.tiers import keeps_apart
from weft.optim.registry import is_by_element
from weft.plan.plan import Plan, Precision, Recompute
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Tier
from weft.recompute.asked import check_asked, kept_off_host, offloads


def usual_tier(optim: OptimConfig, device: str) -> Tier:
    """Of stages on a device that do not say theirs."""
    if optim.state_tier == "auto" or (optim.state_tier == "host" and device == HOST):
        return "device"
    return optim.state_tier


def usual_param_tier(optim: OptimConfig, device: str) -> Tier:
    """Likewise, of parameters."""
    if optim.param_tier == "auto" or (optim.param_tier == "host" and device == HOST):
        return "device"
    return optim.param_tier


def usual_expert_tier(optim: OptimConfig, device: str) -> Tier:
    """Likewise, of experts."""
    if optim.expert_tier == "auto" or (optim.expert_tier == "host" and device == HOST):
        return "device"
    return optim.expert_tier


def experts_kept(optim: OptimConfig, asked: StageConfig, device: str) -> dict[str, Any]:
    """What a stage says of where its experts are, as the plan's fields."""
    return {
        "expert_tier": asked.expert_tier or usual_expert_tier(optim, device),
        "expert_layers": asked.expert_layers or optim.expert_layers,
    }


def usual_recompute(asked: Recompute, device: str) -> Recompute:
    """Likewise, of what layers compute again or keep on hosts.

    Raises:
        ConfigError: modes that do not go together.
    """
    usual = "off" if asked == "auto" else asked
    check_asked("compute.recompute", usual)
    return kept_off_host(usual) if device == HOST else usual


def tiers_asked(optim: OptimConfig) -> tuple[Tier, ...]:
    """What a planner may choose among for what only updates need, in order.

    Raises:
        ConfigError: files are asked for, and no folder for them.
    """
    return _asked(optim, optim.state_tier)


def param_tiers_asked(optim: OptimConfig, precision: Precision) -> tuple[Tier, ...]:
    """Likewise for parameters.

    Raises:
        ConfigError: and where what is updated is what is computed with.
    """
    roles = PRECISIONS[precision]
    if roles.master.stored_as != roles.parameters.stored_as:
        return _asked(optim, optim.param_tier)
    if optim.param_tier not in ("auto", "device"):
        hint = f"{precision} updates what it computes with; bf16, fp16 and fp8 have copies."
        raise ConfigError("optim.param_tier", optim.param_tier, "device", hint)
    return ("device",)


def expert_tiers_asked(optim: OptimConfig) -> tuple[Tier, ...]:
    """Likewise for experts, which an optimizer must be able to take in pieces."""
    if optim.expert_tier == "auto" and not is_by_element(optim):
        return ("device",)
    return _asked(optim, optim.expert_tier)


def _asked(optim: OptimConfig, tier: Tier | Literal["auto"]) -> tuple[Tier, ...]:
    if tier != "auto":
        _refuse_folder(optim, [tier], is_open=True)
        return (tier,)
    return ("device", "host", "disk") if optim.state_folder else ("device", "host")


def refuse_tiers(plan: Plan, config: Config) -> None:
    """What has no effect, cannot be kept anywhere, or needs what another option takes away.

    Raises:
        ConfigError: such a choice.
    """
    optim = config.optim
    tiers = sorted({stage.state_tier for _, _, stage in plan.stages()})
    apart = {keeps_apart(stage.state_tier, stage.device) for _, _, stage in plan.stages()}
    if optim.state_tier == "host" and apart == {False}:
        hint = "A processor's memory is the host's: nothing would be gained."
        raise ConfigError("optim.state_tier", "host", "device or disk on processors", hint)
    _refuse_params(plan, optim)
    refuse_offload(plan.devices, config)
    _refuse_experts(plan, optim)
    kept: list[Tier] = ["disk"] if has_files(plan) else []
    _refuse_folder(optim, kept, is_open=config.plan.auto is not None)
    if len(apart) > 1 and not is_by_element(optim):
        hint = f"{optim.kind} takes the same parameters on all ranks at a time."
        expected = "on the device in all stages or in none"
        raise ConfigError("stages.state_tier", tiers, expected, hint)
    if True in apart and plan.sites:
        expected, hint = "device in a plan with sites", "Sites meet with what is on the device."
        raise ConfigError("optim.state_tier", optim.state_tier, expected, hint)


def _refuse_params(plan: Plan, optim: OptimConfig) -> None:
    if optim.param_tier == "host" and {s.param_tier for _, _, s in plan.stages()} == {"device"}:
        hint = "A processor's memory is the host's: nothing would be gained."
        raise ConfigError("optim.param_tier", "host", "device or disk on processors", hint)


def has_files(plan: Plan) -> bool:
    """A stage keeps something on disk."""
    return any(
        "disk" in (stage.state_tier, stage.param_tier, stage.expert_tier)
        or offloads(stage.recompute, None, "disk")
        for _, _, stage in plan.stages()
    )


def _refuse_experts(plan: Plan, optim: OptimConfig) -> None:
    experts = {stage.expert_tier for _, _, stage in plan.stages()}
    if optim.expert_tier == "host" and experts == {"device"}:
        hint = "A processor's memory is the host's: nothing would be gained."
        raise ConfigError("optim.expert_tier", "host", "device or disk on processors", hint)


def refuse_offload(devices: Collection[str], config: Config) -> None:
    """Raises ConfigError: processors alone are to keep activations on their hosts."""
    recompute = config.compute.recompute
    if recompute != "auto" and offloads(recompute, None, "host") and {*devices} == {HOST}:
        hint = "A processor's memory is the host's: nothing would be gained."
        expected = f"{kept_off_host(recompute)} on processors"
        raise ConfigError("compute.recompute", recompute, expected, hint)


def _refuse_folder(optim: OptimConfig, tiers: Sequence[Tier], *, is_open: bool) -> None:
    """It is there where it is needed; and needed, unless a planner may still choose."""
    folder = optim.state_folder
    if "disk" in tiers and folder is None:
        hint = "Choose one on a fast disk of every machine."
        raise ConfigError("optim.state_folder", None, "a folder for what is kept on disk", hint)
    if folder and "disk" not in tiers and not is_open:
        expected = "null where nothing is kept on disk"
        hint = "optim.state_tier=disk keeps state there, optim.param_tier=disk parameters and "
        hint += "compute.recompute=offload_disk activations; in a plan's file stages say their own."
        raise ConfigError("optim.state_folder", folder, expected, hint)
