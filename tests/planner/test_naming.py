"""Names of plans tell how many chips of which kind do what."""

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.naming import name_of

CLUSTER = ClusterView(
    (
        ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=8),
        ChipPool(chip=catalogue()["T4"], num_nodes=8, chips_per_node=1),
    )
)


def pipeline(*meshes: Mesh, chunks: int = 1) -> PipelinePlan:
    """Four layers over the meshes; with two chunks the stages go down and up again."""
    order = [*meshes, *reversed(meshes)] if chunks == 2 else list(meshes)
    each = 4 // len(order)
    stages = tuple(
        StagePlan(mesh=mesh, layers=(n * each, (n + 1) * each)) for n, mesh in enumerate(order)
    )
    schedule = "zb-v" if chunks == 2 else "1f1b"
    return PipelinePlan(stages=stages, samples=8, microbatch=4, schedule=schedule)


def mesh(*ranks: int, dp: int = 1, tp: int = 1) -> Mesh:
    return Mesh.of(ranks, dp=dp, tp=tp)


SPLIT = (mesh(0, 1, 2, 3, dp=2, tp=2), mesh(4, 5, 6, 7, dp=2, tp=2))


@pytest.mark.parametrize(
    ("pipelines", "name"),
    [
        ([pipeline(mesh(0))], "1 H100-SXM5-80GB"),
        ([pipeline(mesh(0, 1, dp=2))], "dp 2 on 2 H100-SXM5-80GB"),
        ([pipeline(*SPLIT)], "pp 2 x (dp 2 x tp 2) on 8 H100-SXM5-80GB"),
        # Two stages on each mesh are one position of the pipeline.
        ([pipeline(*SPLIT, chunks=2)], "pp 2 x (dp 2 x tp 2) on 8 H100-SXM5-80GB"),
        ([pipeline(mesh(8), mesh(9))], "pp 2 on 2 T4"),
        (
            [pipeline(mesh(0, 8, tp=2).with_shares(tp=(3, 1)), mesh(1, 9, tp=2))],
            "tp 2 (3:1) on 2 H100-SXM5-80GB and T4, then tp 2 on 2 H100-SXM5-80GB and T4",
        ),
        (
            [pipeline(mesh(0, 1, dp=2), mesh(2, 3, tp=2), mesh(8), mesh(9))],
            "dp 2 on 2 H100-SXM5-80GB, then tp 2 on 2 H100-SXM5-80GB, then pp 2 on 2 T4",
        ),
        (
            [pipeline(mesh(0, 1, dp=2)), pipeline(mesh(8)), pipeline(mesh(9))],
            "3 pipelines side by side: [dp 2 on 2 H100-SXM5-80GB] + 2 x [1 T4]",
        ),
    ],
)
def test_a_name_tells_chips(pipelines: list[PipelinePlan], name: str) -> None:
    assert name_of(Plan(num_layers=4, pipelines=tuple(pipelines)), CLUSTER) == name
