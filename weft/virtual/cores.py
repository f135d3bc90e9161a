"""What a part of a model costs on a chip of a lab, which is a part of a core.

The operations are those that the planner counts (``weft.cost``); a chip of speed 0.4 is a core
whose rates are 0.4 of the whole one's. Parts of a model compare well, seconds less.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from weft.cost.choice import by_layer, choice_of, dtype_of
from weft.cost.rates import Roofline, compute_seconds
from weft.cost.times import StageTimes
from weft.cost.timing import Hardware, Software, stage_times
from weft.cost.traffic import Fabric
from weft.cost.work import StageWork
from weft.models.registry import shape_of
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan

GFLOPS = 50.0
"""Of a chip of speed 1: about what one core of a server multiplies in fp32 while it trains."""
_FLOPS_A_BYTE = 5.0
"""Of large products in the time in which a core moves a byte from and to its memory."""


NO_LINKS = Fabric(
    chips_per_node=1,
    inside_bytes_s=inf,
    across_bytes_s=inf,
    inside_latency_s=0.0,
    across_latency_s=0.0,
)
"""That take no time: for computing alone."""
BARE = Software()


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
    shape, free = shape_of(spec), Hardware(chip=chip, fabric=NO_LINKS, software=BARE)
    choice = choice_of(pipeline, number, seq_len)
    return [stage_times(shape, each, free) for each in by_layer(choice)]


def sample_s(pipeline: PipelinePlan, spec: ModelSpec, seq_len: int, chip: Roofline) -> float:
    """Seconds of the whole model for one sample of a full microbatch, without recomputation."""
    whole = StageWork(
        layers=(0, spec.num_layers),
        embeds=True,
        predicts=True,
        samples=pipeline.microbatch,
        seq_len=seq_len,
        dtype=dtype_of(pipeline.stages[0].precision),
    )
    return compute_seconds(shape_of(spec), whole, chip).whole_s / pipeline.microbatch
