"""Products of fp32 numbers: with all bits, or in TF32 where somebody asks and a card has it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.platform.registry import PLATFORMS


def tf32_note(plan: Plan, cluster: Cluster, *, asked: bool) -> Iterator[str]:
    """What stages in fp32 multiply with, where there is a choice.

    Raises:
        ConfigError: it is asked for, and would change nothing.
    """
    computing = {f"{stage.precision} on {stage.device}": stage for _, _, stage in plan.stages()}
    able = [
        stage.device
        for stage in computing.values()
        if stage.precision == "fp32" and has_tf32(stage.device, cluster)
    ]
    if asked and not able:
        expected = f"false where no stage has TF32 (they compute in {', '.join(computing)})"
        hint = "compute.precision=fp32 on a card that has it does; bf16 and fp16 are faster still."
        raise ConfigError("compute.tf32", asked, expected, hint)
    for device in able:
        exact = "with all bits, which compute.tf32=true trades for speed"
        how = "in TF32 (10 bits of 23)" if asked else exact
        yield f"fp32 on {device} multiplies {how}"


def has_tf32(device: str, cluster: Cluster) -> bool:
    """The family has it, and the data sheet of none of its chips here says that this one has not.

    A chip without data may have it; one that has none then multiplies with all bits.
    """
    chips = [chip for node in cluster.nodes for chip in node.chips if chip.device == device]
    lacks = any(chip.peak_flops("fp32") and not chip.peak_flops("tf32") for chip in chips)
    return device in PLATFORMS and PLATFORMS[device].has_tf32 and not lacks
