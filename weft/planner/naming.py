"""What to call a plan: how many stages, split how, on which chips."""

from __future__ import annotations

from itertools import groupby

from weft.cluster.view import ClusterView
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan


def name_of(plan: Plan, cluster: ClusterView) -> str:
    """``pp 4 x (AXIS 2 x AXIS 8) on 64 H100``; pipelines that are called alike are counted.

    ``pp`` counts meshes: each is one position of the pipeline, with one stage or several. ``AXIS 2
    (3:1)``: its places have unlike parts, by these weights.
    """
    names = [_pipeline(pipeline, cluster) for pipeline in plan.pipelines]
    if len(names) == 1:
        return names[0]
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    parts = [f"{number} x [{name}]" if number > 1 else f"[{name}]" for name, number in runs]
    return f"{len(names)} pipelines side by side: {' + '.join(parts)}"


def elsewhere(stage: StagePlan) -> list[str]:
    """What a stage keeps elsewhere than on its devices, activations apart, and how weights come."""
    kept = [("state", stage.state_tier), ("parameters", stage.param_tier)]
    kept += [("experts", stage.expert_tier)]
    comes = [f"weights gathered in {stage.gather}"] * bool(stage.gather)
    comes += [f"gradients summed in {stage.reduction}, so numbers depend on who does"] * bool(
        stage.reduction
    )
    return comes + [f"{what} on {tier}" for what, tier in kept if tier != "device"]


def _pipeline(pipeline: PipelinePlan, cluster: ClusterView) -> str:
    meshes = [pipeline.stages[stages[0]].mesh for stages in pipeline.positions()]

    def kind(mesh: Mesh) -> tuple[str, str]:
        names = dict.fromkeys(cluster.pool_of(rank).chip.name for rank in mesh.ranks)
        return " x ".join(mesh.words), " and ".join(names)

    parts = []
    for (axes, chip), same in groupby(meshes, key=kind):
        run = list(same)
        ranks = sum(len(mesh.ranks) for mesh in run)
        how = axes if len(run) == 1 else f"pp {len(run)} x ({axes})" if axes else f"pp {len(run)}"
        parts.append(f"{how} on {ranks} {chip}" if how else f"{ranks} {chip}")
    return ", then ".join(parts)
