"""How many queues of work a rank of a plan keeps at once on its device. No torch.

A device runs its streams side by side only as far as it has queues for them: two streams on one
queue wait for each other.
"""

from __future__ import annotations

from itertools import pairwise

from weft.plan.plan import Plan


def streams(plan: Plan, rank: int) -> dict[str, int]:
    """By what they are for. Every communicator of a rank has a stream of its own."""
    mine = plan.rank_plan(rank)
    pipeline, mesh = mine.pipeline_plan, mine.stage_plan.mesh
    crossed = sum(
        before.mesh != after.mesh and mesh in (before.mesh, after.mesh)
        for before, after in pairwise(pipeline.stages)
    )
    holders = set[tuple[int, ...]]()
    for stage in mine.stages:
        for unit in plan.units(mine.pipeline, stage):
            alike = plan.stages_with({unit})
            holders.add(tuple(sorted({each for _, _, s in alike for each in s.mesh.ranks})))
    # What an axis divides is held by fewer than what it does not; tied ends are held by both.
    forms = 1 + len(mesh.inner_axes)
    reductions = forms * sum(len(ranks) > 1 for ranks in holders)
    apart = sum(len(plan.by_domain(ranks)) > 1 for ranks in holders)
    shards = any(pipeline.stages[stage].zero for stage in mine.stages)
    return {
        "compute": 1,
        "copies": 1,
        "channels": 2 * crossed,
        "axes": len(mesh.inner_axes),
        "reductions": reductions,
        "gathers": reductions if shards else 0,
        "between domains": 1 + 3 * forms * apart if apart else 0,
        "all ranks": int(plan.world_size > 1),
    }
