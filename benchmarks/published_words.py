"""What records say in words, of recomputation, shared state, offload, schedules and precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from benchmarks.job import JobSchedule
from benchmarks.software import FULL, Generation
from weft.cluster.cluster import Dtype
from weft.plan.plan import ZeroLevel
from weft.precision.roles import Tier
from weft.recompute.asked import Slabs

MODES = {
    "core": r"core.?att",
    "attention": r"(?<!core.)(?<!core)(self.?)?att(ention|n)\b|mla",
    "activation": r"\bact\b|[a-z]+_act\b|activation func|swiglu|gelu",
    "feed_forward": r"\bmlp\b|feed.?forward|\bffn\b|\bmoe\b|expert",
    "offload": r"offload",
}
"""Our modes by what others call those parts of a layer; norms alone are taken as nothing."""


def recompute_of(words: str, generation: Generation, layers: int) -> Slabs:
    """``full``, ``full block 4``, ``selective``, or parts of layers such as ``core_attn, mlp``.

    ``layers``: of one stage, of which some may be named.
    """
    text = words.lower()
    if text.startswith("full"):
        part = _part(text, layers)
        return FULL if part >= 1 else ((("full",), part),)
    named = tuple(_modes(text, generation))
    if named and not text.startswith(("no", "unknown")):
        return ((named, _part(text, layers)),)
    return generation.selective_slabs if text.startswith("selective") else ()


def _modes(text: str, generation: Generation) -> Iterator[str]:
    """Named in a text; fused attention has no scores to drop."""
    for name, mark in MODES.items():
        if re.search(mark, text) and not (name == "core" and generation.fused_attention):
            yield name


def _part(text: str, layers: int) -> float:
    """Of a stage's layers: ``10 of 40``, ``block 5``, ``20 layers``; all where none are counted."""
    found = re.search(r"(\d+)\s*(?:of|/)\s*(\d+)", text)
    if found and int(found[2]):
        return min(int(found[1]) / int(found[2]), 1.0)
    found = re.search(r"block\D{0,3}(\d+)|(\d+)\s*layers", text)
    if found and "uniform" not in text:
        return min(int(found[1] or found[2]) / max(layers, 1), 1.0)
    return 1.0


def offload_of(words: str) -> Tier:
    """Where what only updates need is kept."""
    text = words.lower()
    if re.search(r"nvme|disk|ssd", text):
        return "disk"
    return "host" if re.search(r"optim|state|zero|cpu|host|param|true", text) else "device"


def sharing_of(words: str) -> tuple[ZeroLevel, int]:
    """ZeRO level, and how many ranks share (0 is all)."""
    text = words.lower()
    near = 8 if "hsdp" in text or "within" in text else 0
    if any(mark in text for mark in ("fsdp", "hsdp", "zero3", "zero-3", "full_shard")):
        return 3, near
    for level in get_args(ZeroLevel):
        if f"zero{level}" in text or f"zero-{level}" in text:
            return level, near
    return (1, near) if "distributed" in text or "scatter" in text else (0, 0)


def schedule_of(framework: str) -> JobSchedule:
    """As the zero bubble's authors call theirs; else 1F1B."""
    if "ZB-2p" in framework or "ZB-H2" in framework:
        return "zb-h2"
    return "zb-h1" if "ZB-" in framework else "1f1b"


def dtype_of(words: str) -> Dtype:
    """In which products are computed; of two bytes, whichever the chip has units for."""
    text = words.lower()
    if any(mark in text for mark in ("fp8", "float8", "int8", "fp4")):
        return "fp8"
    return "fp32" if text == "fp32" else "fp16"
