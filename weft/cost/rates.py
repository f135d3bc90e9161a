"""How long one operation takes on one chip: a roofline, or what the chip's vendor says.

A product's time follows from its FLOPs at the rate that large products reach and its operands at
the memory's rate, so efficiency falls with the shape: small sides mean more bytes a FLOP. Rates
come from a profile of the chip, from measurements in the catalogue, or from the chip's class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import hypot
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from weft.cluster.cluster import Chip, Dtype
from weft.config.errors import ConfigError
from weft.cost.operators import PHASES, Op, Phase, stage_ops
from weft.cost.times import StageTimes
from weft.cost.work import StageWork
from weft.models.shape import ModelShape
from weft.recompute.registry import MODES


class CostFunction(Protocol):
    """What a vendor may supply in place of the roofline: hashable, so that costs can be kept."""

    def __hash__(self) -> int: ...

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        """Seconds of one phase of an operation whose products are of ``dtype``."""

    def moving_seconds(self, num_bytes: float) -> float:
        """Seconds to move bytes through the chip's memory, as an optimizer does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Parts of a data sheet's rates that a class of chips reaches in training."""

    matmul: float
    """Large products in two bytes and more."""
    fp8: float
    attention: float
    """Fused attention, of the two-byte rate."""
    memory: float


@dataclass(frozen=True, slots=True)
class ChipClass:
    """Chips that are given the same efficiency."""

    name: str
    vendor: str
    chips: tuple[str, ...]
    """How their names begin."""
    efficiency: Efficiency


OTHER = "other"
"""The class of all chips that no class names."""


@cache
def chip_classes() -> Mapping[str, ChipClass]:
    """By name; fitted to published runs (docs/prediction.md), with what all software adds to the
    model's traffic through memory."""
    data = json.loads(Path(__file__).with_name("efficiency.json").read_text("utf-8"))
    found = [
        ChipClass(each["name"], each["vendor"], tuple(each["chips"]), Efficiency(**each["rates"]))
        for each in data["classes"]
    ]
    return MappingProxyType({each.name: each for each in found})


USUAL_BEST = 0.8
"""Part of the data sheet's rate that the best large product reaches on most chips."""
HIGHEST = 0.9
"""No training reaches more of a data sheet's rate."""


def efficiency_of(chip: Chip, of_class: Efficiency | None = None) -> Efficiency:
    """Of the chip's class; where that is all others, as the chip's best product was measured."""
    part = of_class or chip_classes()[chip_class(chip)].efficiency
    if chip_class(chip) != OTHER:
        return part
    wide = _best(chip, "bf16") or USUAL_BEST
    narrow = _best(chip, "fp8") or wide
    return replace(
        part,
        matmul=min(part.matmul * wide / USUAL_BEST, HIGHEST),
        attention=min(part.attention * wide / USUAL_BEST, HIGHEST),
        fp8=min(part.fp8 * narrow / USUAL_BEST, HIGHEST),
    )


def _best(chip: Chip, dtype: Dtype) -> float | None:
    """The best product that others measured, as a part of the data sheet's rate."""
    peak, best = chip.peak_tflops.get(dtype), chip.measured_tflops.get(dtype)
    return best / peak if peak and best else None


def chip_class(chip: Chip) -> str:
    """The class whose efficiency a chip without a profile is given."""
    made = (each for each in chip_classes().values() if each.vendor == chip.vendor)
    return next((each.name for each in made if chip.name.startswith(each.chips)), OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The rates of one chip."""

    flops_s: float
    """Large products in two bytes that the chip has units for, FLOP/s."""
    fp8_flops_s: float
    fp32_flops_s: float
    attention_flops_s: float
    bytes_s: float
    unaligned: float = 0.3
    """Part of the rate that is left where a head's channels are no multiple of 8."""
    bf16_part: float = 1.0
    """Part of the rate that is left in bf16: less than 1 where it is multiplied as fp32."""
    launch_s: float = 2e-5
    """Of one operation here, which is a few on the chip, where it waits for its host."""

    @staticmethod
    def of(chip: Chip, efficiency: Efficiency | None = None, *, tf32: bool = False) -> Roofline:
        """Of a chip in the catalogue; ``tf32``: products of fp32 numbers are in that, if it can.

        Raises:
            ConfigError: the catalogue lacks a rate that time cannot be told without.
        """
        part = efficiency_of(chip, efficiency)
        peak = chip.product_flops
        if not peak or chip.memory_gb_s is None:
            lacks = "memory_gb_s" if peak else "peak_tflops.bf16"
            hint = "Give it in a profile of the chip, or a cost function of your own."
            raise ConfigError(f"chip {chip.name}: {lacks}", None, "a positive number", hint)
        fp8, single = chip.peak_flops("fp8"), chip.peak_flops("fp32")
        if tf32:
            single = chip.peak_flops("tf32") or single
        emulated = chip.emulates_bf16
        return Roofline(
            flops_s=peak * part.matmul,
            fp8_flops_s=fp8 * part.fp8 if fp8 and part.fp8 else peak * part.matmul,
            fp32_flops_s=(single or peak / 8) * part.matmul,
            attention_flops_s=peak * part.attention,
            bytes_s=chip.memory_gb_s * 1e9 * part.memory,
            bf16_part=(chip.peak_flops("fp32") or peak / 8) / peak if emulated else 1.0,
        )

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        """FLOPs at the rate of large products beside bytes at that of the memory.

        The larger counts most; a kernel hides nearly all of a much smaller one.
        """
        flops = op.phase_flops(phase)
        if op.kind == "attention":
            rate = self.attention_flops_s
        elif dtype == "fp8" and op.kind == "matmul" and op.name != "head":
            rate = self.fp8_flops_s
        else:
            rate = self.fp32_flops_s if dtype == "fp32" else self.flops_s
        if dtype in ("bf16", "fp8"):
            rate *= self.bf16_part
        if not _aligned(op):
            rate *= self.unaligned
        moved = op.phase_bytes(phase) * (2 if dtype == "fp32" else 1)
        busy = hypot(flops / rate, moved / self.bytes_s)
        launches = max(op.repeat / 4, 1) if op.kind == "matmul" else 1  # experts by four streams
        return busy + launches * self.launch_s if busy else 0.0

    def moving_seconds(self, num_bytes: float) -> float:
        """At the memory's rate."""
        return num_bytes / self.bytes_s


def _aligned(op: Op) -> bool:
    """Tensor cores read rows of 16 bytes; the sizes of weights are chosen with that in mind."""
    return op.kind != "batched" or (op.n % 8 == 0 and op.k % 8 == 0)


@lru_cache(maxsize=1 << 14)
def compute_seconds(shape: ModelShape, work: StageWork, chip: CostFunction) -> StageTimes:
    """Computing alone, without what a stage says to others."""
    total = dict.fromkeys(PHASES, 0.0)
    again = 0.0
    for each, (op, number) in ((w, found) for w in work.in_turn() for found in stage_ops(shape, w)):
        # Gradients of a head that is not split come with its forward.
        is_whole = work.predicts == 1 and work.share("vocab") == 1
        early = work.eager and is_whole and op.name in ("head", "loss")
        for phase in PHASES:
            total["forward" if early else phase] += number * _op_seconds(op, phase, work, chip)
        part = _again(op, each)
        if part:
            again += part * number * _op_seconds(op, "forward", work, chip)
    weights = 0.0 if work.frozen else total["weight_grad"]
    return StageTimes(
        forward_s=total["forward"], input_grad_s=total["input_grad"] + again, weight_grad_s=weights
    )


def _op_seconds(op: Op, phase: Phase, work: StageWork, chip: CostFunction) -> float:
    narrow = chip.seconds(op, phase, work.dtype)
    if work.dtype != "fp8":
        return narrow
    if work.in_chunks and op.name.startswith("expert ") and phase == "weight_grad":
        return chip.seconds(op, phase, "bf16")  # as weft/parallel/fp8/experts.py does
    if not work.wide_products:
        return narrow
    return narrow + work.wide_products * (chip.seconds(op, phase, "bf16") - narrow)


def _again(op: Op, work: StageWork) -> float:
    """What part of the operation's forward backward computes a second time."""
    if op.name in ("embedding", "last norm", "head", "loss"):
        return 0.0
    layers = ((part, name) for names, part in work.recompute for name in names)
    return sum(part * MODES[name].repeats(op.name) for part, name in layers)
