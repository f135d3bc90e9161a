"""Timelines of a mix: one step of a part's plan or of the mix's, from measured rates.

Times of stages follow from the measured rate of each kind alone and what its layers cost; links
are drawn as if they cost nothing. Where the measured mix is slower than its timeline, they cost.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.mix.plans import Work
from weft.plan.plan import PipelinePlan, Plan
from weft.simulate.play import simulate_plan
from weft.simulate.timeline import Timeline
from weft.simulate.times import SeamTimes, StageTimes
from weft.virtual.cores import part


def timelines(plan: Plan, rates: Mapping[int, float], work: Work) -> list[Timeline]:
    """One for each pipeline. ``rates``: tokens per second of the whole model on a rank's chip."""
    found = []
    for pipeline in plan.pipelines:
        stages = [_times(pipeline, s, rates, work) for s in range(len(pipeline.stages))]
        found.append(simulate_plan(pipeline, stages, [SeamTimes()] * (len(stages) - 1)))
    return found


def _times(
    pipeline: PipelinePlan, stage: int, rates: Mapping[int, float], work: Work
) -> StageTimes:
    """Backward costs twice the forward, in equal halves; recomputing, one more forward."""
    plan = pipeline.stages[stage]
    layers = plan.layers[1] - plan.layers[0]
    last = len(pipeline.stages) - 1
    piece = part(work.spec, work.seq_len, layers, embeds=stage == 0, predicts=stage == last)
    speed = sum(rates[rank] for rank in plan.mesh.ranks)
    third = pipeline.microbatch * work.seq_len * piece / speed / 3
    again = third if plan.recompute == "full" else 0.0
    return StageTimes(forward_s=third, input_grad_s=third + again, weight_grad_s=third)
