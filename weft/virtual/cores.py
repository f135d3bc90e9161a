"""What a part of a model costs on a chip of a lab, which is a part of a core.

The operations are those that the planner counts (``weft.cost``); a chip of speed 0.4 is a core
whose rates are 0.4 of the whole one's. Parts of a model compare well, seconds less.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from weft.cost.memory import work_of
from weft.cost.rates import Roofline, compute_seconds
from weft.cost.work import StageWork
from weft.models.registry import shape_of
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan
from weft.simulate.times import StageTimes

GFLOPS = 50.0
"""Of a chip of speed 1: about what one core of a server multiplies in fp32 while it trains."""
_FLOPS_A_BYTE = 5.0
"""Of large products in the time in which a core moves a byte from and to its memory."""


@lru_cache(maxsize=256)
def core(gflops: float = GFLOPS) -> Roofline:
    """A core, or a part of one, that does so many 10^9 FLOP/s."""
    rate = gflops * 1e9
    return Roofline(
        flops_s=rate,
        fp8_flops_s=rate,
        fp32_flops_s=rate,
        attention_flops_s=rate,
        bytes_s=rate / _FLOPS_A_BYTE,
        unaligned=1.0,
        launch_s=0.0,
    )


def layer_times(
    pipeline: PipelinePlan, number: int, spec: ModelSpec, seq_len: int, chip: Roofline
) -> list[StageTimes]:
    """One full microbatch on one rank of a stage, that with the most samples, layer by layer.

    The embedding is the first stage's first layer, the head the last one's last.
    """
    passes = pipeline.stages[number].passes
    work = work_of(pipeline, number, seq_len)
    parts = [
        replace(work, layers=(n, n + 1), embeds=False, predicts=False) for n in range(*work.layers)
    ]
    if work.embeds:
        parts.insert(0, replace(work, layers=(0, 0), predicts=False))
    if work.predicts:
        parts.append(replace(work, layers=(0, 0), embeds=False))
    shape = shape_of(spec)
    found = []
    for each in parts:
        times = compute_seconds(shape, each, chip)
        found.append(
            StageTimes(
                forward_s=times.forward * passes,
                input_grad_s=times.input_grad * passes,
                weight_grad_s=times.weight_grad * passes,
            )
        )
    return found


def sample_s(pipeline: PipelinePlan, spec: ModelSpec, seq_len: int, chip: Roofline) -> float:
    """Seconds of the whole model for one sample of a full microbatch, without recomputation."""
    work = StageWork(
        layers=(0, spec.num_layers),
        embeds=True,
        predicts=True,
        samples=pipeline.microbatch,
        seq_len=seq_len,
        dtype="bf16" if pipeline.stages[0].precision == "bf16" else "fp32",
    )
    return compute_seconds(shape_of(spec), work, chip).whole / pipeline.microbatch
