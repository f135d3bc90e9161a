"""What a run's chips could do in matrix products: the reference of its MFU. Nothing is measured.

A chip's peak is that of its data sheet (``weft/cluster/chips.json``, or the cluster's file), else
of a kept profile (``weft chips profile``); where there is neither, there is no MFU. Where there are
both, the profile's best product stands beside the data sheet's rate.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.cluster.cluster import HOST, Chip, Dtype, Node
from weft.config.errors import ConfigError, ConfigErrors
from weft.cost.profile import Profile
from weft.cost.work import width_of
from weft.plan.plan import Precision, StagePlan
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
    measured_flops: float | None = None
    """What a profile measured at best, beside a data sheet's ``flops``; None: not both known."""
    measured_basis: str = ""
    """The same in words."""


def peaks_here(
    resolved: Resolved, ranks: Sequence[int], *, environment: Mapping[str, str] = os.environ
) -> dict[int, Peak]:
    """Of the ranks of a plan that this machine runs."""
    plan, node = resolved.plan, resolved.cluster.nodes[0]
    try:
        if file := environment.get(CLUSTER_VARIABLE):
            known, places = chips_of_file(Path(file), node, plan.world_size), ranks
        else:
            devices = [plan.devices[rank] for rank in ranks]
            profile = local_profile(node)
            machine = Machine(node=node, devices=devices, profile=profile, threads=resolved.threads)
            known, places = chips_of_machines([machine]), range(len(ranks))
        pairs = zip(ranks, places, strict=True)
        chips = {rank: known.view.pool_of(place).chip for rank, place in pairs}
        return {
            rank: Peak(basis=UNMEASURED)
            if known.is_guess and chip.device == HOST
            else _peak(
                chip, plan.rank_plan(rank).stage_plan, node, tf32=resolved.config.compute.tf32
            )
            for rank, chip in chips.items()
        }
    except (ConfigError, ConfigErrors) as error:
        told = error.errors[0] if isinstance(error, ConfigErrors) else error
        return dict.fromkeys(ranks, Peak(basis=str(told)))


def _peak(chip: Chip, stage: StagePlan, node: Node, *, tf32: bool) -> Peak:
    is_core = chip.device == HOST
    profile = local_profile(node, chip=None if is_core else chip.name)
    best, best_flops, source = _best(profile, stage.precision)
    words = f"{flop_rate(best_flops)} in {best}, {source}"
    dtype = peak_dtype(chip, stage.precision, tf32=tf32)
    if profile is not None and (is_core or dtype is None):
        own = chip.peak_flops(best) or best_flops
        return Peak(flops=own, basis=f"{flop_rate(own)} in {best}, {source} of {chip.name}")
    flops = chip.peak_flops(dtype) if dtype else None
    if not flops:
        hint = "run `weft chips profile`"
        return Peak(basis=f"neither the catalogue nor a profile has {chip.name}; {hint}")
    found = Peak(flops=flops, basis=f"{flop_rate(flops)} in {dtype}, the data sheet of {chip.name}")
    if profile is None or (best != dtype and {best, dtype} != {"bf16", "fp16"}):
        return found
    return replace(found, measured_flops=best_flops, measured_basis=words)


def _best(profile: Profile | None, precision: Precision) -> tuple[Dtype, float, str]:
    """The best product of a profile in a plan's precision: in what, FLOP/s, and who says so."""
    if profile is None:
        return "fp32", 0.0, ""
    two: tuple[Dtype, ...] = ("bf16", "fp16") if width_of(precision) == 2 else ()
    measured = [dtype for dtype in two if profile.peak_flops(dtype)]
    dtype: Dtype = max(measured, key=profile.peak_flops, default="fp32")
    return dtype, profile.peak_flops(dtype), f"a profile ({profile.machine.date})"


def peak_of_all(peaks: Sequence[Peak]) -> Peak:
    """Of a job: the sum over its ranks; not known where that of one of them is not."""
    for rank, peak in enumerate(peaks):
        if peak.flops is None:
            return Peak(basis=f"rank {rank}: {peak.basis}" if len(peaks) > 1 else peak.basis)
    measured = [peak.measured_flops for peak in peaks if peak.measured_flops is not None]
    is_measured = len(measured) == len(peaks) > 0
    return Peak(
        flops=sum(peak.flops or 0.0 for peak in peaks),
        basis=_together(peak.basis for peak in peaks),
        measured_flops=sum(measured) if is_measured else None,
        measured_basis=_together(peak.measured_basis for peak in peaks) if is_measured else "",
    )


def _together(bases: Iterable[str]) -> str:
    alike = Counter(bases)
    return " + ".join(f"{many} x {each}" if many > 1 else each for each, many in alike.items())


def in_words(peak: Peak) -> str:
    """The line that a run begins with."""
    if peak.flops is None:
        return f"no MFU: {peak.basis}" if peak.basis else "no MFU: the chips' rates are not known"
    beside = ""
    if peak.measured_flops is not None:
        beside = f"; beside it of {flop_rate(peak.measured_flops)} measured: {peak.measured_basis}"
    return f"MFU is of {flop_rate(peak.flops)}: {peak.basis}{beside}"
