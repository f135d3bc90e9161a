"""What a run's chips could do in matrix products: the reference of its MFU. Nothing is measured.

A chip's peak is that of its data sheet (``weft/cluster/chips.json``, or the cluster's file), else
of a kept profile (``weft chips profile``); where there is neither, there is no MFU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.cluster.cluster import HOST, Chip, Node
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.work import width_of
from weft.plan.plan import Precision
from weft.planner.forecast import peak_dtype
from weft.report.units import flop_rate
from weft.resolve.prediction import UNMEASURED
from weft.resolve.rank_chips import CLUSTER_VARIABLE, Machine, chips_of_file, chips_of_machines
from weft.resolve.resolve import Resolved
from weft.simulate.known import local_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """FLOP/s that MFU is measured against."""

    flops: float | None = None
    """None: not known."""
    basis: str = ""
    """Whose rate it is and who says so, or why there is none, in words."""


def peaks_here(
    resolved: Resolved, ranks: range, *, environment: Mapping[str, str] = os.environ
) -> dict[int, Peak]:
    """Of the ranks of a plan that this machine runs."""
    plan, node = resolved.plan, resolved.cluster.nodes[0]
    try:
        if file := environment.get(CLUSTER_VARIABLE):
            known, first = chips_of_file(Path(file), node, plan.world_size), 0
        else:
            devices = [plan.devices[rank] for rank in ranks]
            profile = local_profile(node)
            machine = Machine(node=node, devices=devices, profile=profile, threads=resolved.threads)
            known, first = chips_of_machines([machine]), ranks.start
        chips = {rank: known.view.pool_of(rank - first).chip for rank in ranks}
        return {
            rank: Peak(basis=UNMEASURED)
            if known.is_guess and chip.device == HOST
            else _peak(chip, plan.rank_plan(rank).stage_plan.precision, node)
            for rank, chip in chips.items()
        }
    except (ConfigError, ConfigErrors) as error:
        told = error.errors[0] if isinstance(error, ConfigErrors) else error
        return dict.fromkeys(ranks, Peak(basis=str(told)))


def _peak(chip: Chip, precision: Precision, node: Node) -> Peak:
    is_core = chip.device == HOST
    profile = local_profile(node, chip=None if is_core else chip.name)
    dtype, source = peak_dtype(chip, precision), "the data sheet"
    flops = dtype and chip.peak_flops(dtype)
    if profile is not None and (is_core or not flops):
        source = f"a profile ({profile.machine.date})"
        is_bf16 = width_of(precision) == 2 and profile.peak_flops("bf16") > 0
        dtype = "bf16" if is_bf16 else "fp32"
        flops = chip.peak_flops(dtype) or profile.peak_flops(dtype)
    if not flops:
        hint = "run `weft chips profile`"
        return Peak(basis=f"neither the catalogue nor a profile has {chip.name}; {hint}")
    return Peak(flops=flops, basis=f"{flop_rate(flops)} in {dtype}, {source} of {chip.name}")


def peak_of_all(peaks: Sequence[Peak]) -> Peak:
    """Of a job: the sum over its ranks; not known where that of one of them is not."""
    for rank, peak in enumerate(peaks):
        if peak.flops is None:
            return Peak(basis=f"rank {rank}: {peak.basis}" if len(peaks) > 1 else peak.basis)
    alike = Counter(peak.basis for peak in peaks)
    parts = [f"{number} x {basis}" if number > 1 else basis for basis, number in alike.items()]
    return Peak(flops=sum(peak.flops or 0.0 for peak in peaks), basis=" + ".join(parts))


def in_words(peak: Peak) -> str:
    """The line that a run begins with."""
    if peak.flops is None:
        return f"no MFU: {peak.basis}" if peak.basis else "no MFU: the chips' rates are not known"
    return f"MFU is of {flop_rate(peak.flops)}: {peak.basis}"
