"""Where a run keeps what only updates need: rules between what is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cluster.cluster import HOST
from weft.config.errors import ConfigError
from weft.config.sections import Config, OptimConfig
from weft.memory.tiers import keeps_apart
from weft.optim.registry import is_by_element
from weft.plan.plan import Plan, Recompute
from weft.precision.roles import Tier
from weft.recompute.asked import computed_again, offloads


def usual_tier(optim: OptimConfig, device: str) -> Tier:
    """Of stages on a device that do not say theirs."""
    if optim.state_tier == "auto" or (optim.state_tier == "host" and device == HOST):
        return "device"
    return optim.state_tier


def usual_param_tier(optim: OptimConfig, device: str) -> Tier:
    """Likewise, of parameters."""
    return "device" if device == HOST else optim.param_tier


def usual_recompute(asked: Recompute, device: str) -> Recompute:
    """Likewise, of what layers compute again or keep on hosts."""
    usual = "off" if asked == "auto" else asked
    return computed_again(usual) if device == HOST else usual


def refuse_param_tier(optim: OptimConfig) -> None:
    """
    Raises:
        ConfigError: parameters are to be on hosts, and the planner chooses, which keeps none there.
    """
    if optim.param_tier != "device":
        hint = "The planner keeps parameters there; stages that are written down may say otherwise."
        raise ConfigError("optim.param_tier", optim.param_tier, "device beside plan.auto", hint)


def tiers_asked(optim: OptimConfig) -> tuple[Tier, ...]:
    """What a planner may choose among, in order.

    Raises:
        ConfigError: files are asked for, and no folder for them.
    """
    if optim.state_tier != "auto":
        _refuse_folder(optim, [optim.state_tier], is_open=True)
        return (optim.state_tier,)
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
    params = {stage.param_tier for _, _, stage in plan.stages()}
    if optim.param_tier == "host" and params == {"device"}:
        hint = "A processor's memory is the host's: nothing would be gained."
        raise ConfigError("optim.param_tier", "host", "device on processors", hint)
    _refuse_offload(plan, config)
    _refuse_folder(optim, tiers, is_open=config.plan.auto is not None)
    if len(apart) > 1 and not is_by_element(optim):
        hint = f"{optim.kind} takes the same parameters on all ranks at a time."
        expected = "on the device in all stages or in none"
        raise ConfigError("stages.state_tier", tiers, expected, hint)
    if True in apart and plan.sites:
        expected, hint = "device in a plan with sites", "Sites meet with what is on the device."
        raise ConfigError("optim.state_tier", optim.state_tier, expected, hint)


def _refuse_offload(plan: Plan, config: Config) -> None:
    recompute = config.compute.recompute
    if recompute != "auto" and offloads(recompute) and {*plan.devices} == {HOST}:
        hint = "A processor's memory is the host's: nothing would be gained."
        expected = f"{computed_again(recompute)} on processors"
        raise ConfigError("compute.recompute", recompute, expected, hint)


def _refuse_folder(optim: OptimConfig, tiers: Sequence[Tier], *, is_open: bool) -> None:
    """It is there where it is needed; and needed, unless a planner may still choose."""
    folder = optim.state_folder
    if "disk" in tiers and folder is None:
        hint = "Choose one on a fast disk of every machine."
        raise ConfigError("optim.state_folder", None, "a folder for what is kept on disk", hint)
    if folder and "disk" not in tiers and not is_open:
        expected = "null where nothing is kept on disk"
        hint = "optim.state_tier=disk keeps it there; in a plan's file each stage says its own."
        raise ConfigError("optim.state_folder", folder, expected, hint)
