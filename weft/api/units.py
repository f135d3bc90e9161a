"""Products in eight bits from Python: on devices that have units for them, else where asked."""

from __future__ import annotations

from dataclasses import asdict

import torch

from weft.cluster.cluster import Chip
from weft.comm.comm import Comm
from weft.plan.plan import Plan
from weft.platform.detect import detect_node
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.resolve.eight_bits import Computing, refuse_emulated

WAY = "emulate_fp8=True"


def refuse_no_units(plan: Plan, comm: Comm, *, asked: bool) -> None:
    """Of any process of the job, so that all refuse alike. Collective.

    Raises:
        ConfigError: a device has no units for the products of its precision, and nobody ``asked``
            to emulate them; or somebody did, and nothing would be emulated.
    """
    if not (asked or any(PRECISIONS[s.precision].has_fast_products for _, _, s in plan.stages())):
        return
    chip = _chip_of(comm.device)
    own = plan.rank_plan(comm.rank).stage_plan.precision
    told = comm.gather_json((own, chip and asdict(chip)), name="units for eight bits")
    computing = [Computing("precision", each, chip and Chip(**chip)) for each, chip in told]
    refuse_emulated(computing, asked=asked, way=WAY)


def _chip_of(device: torch.device) -> Chip | None:
    """None: a processor. One that nobody knows has its family's name."""
    if PLATFORMS[device.type].is_host:
        return None
    here = [chip for chip in detect_node().chips if chip.device == device.type]
    number = device.index or 0
    if number < len(here):
        return here[number]
    return Chip(
        name=device.type, vendor=device.type, memory_gib=0.0, peak_tflops={}, measured_tflops={}
    )
