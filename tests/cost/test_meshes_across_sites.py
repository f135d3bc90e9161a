"""A mesh with ranks at several sites pays for the way between them, along whichever axis."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView, Site
from weft.cost.choice import Group, sites_along_axes
from weft.cost.traffic import WayOut
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Problem, Workload
from weft.simulate.step import Knowledge

WORK = Workload(spec=replace(SIZES["llama3.2-1b"], num_layers=4), seq_len=1024, samples=16)


def two_sites(gbit: float, latency_ms: float = 1.0) -> ClusterView:
    """Of two H100 each, which share the way out."""
    chip = catalogue()["H100-SXM5-80GB"]
    pools = [
        ChipPool(
            chip=chip,
            num_nodes=1,
            chips_per_node=2,
            site=Site(name=name, gbit_s=gbit, latency_s=latency_ms / 1000, num_chips=2),
        )
        for name in "ab"
    ]
    return ClusterView(tuple(pools))


def plan(*stages: Mesh, samples: int = 16) -> Plan:
    """As even as it can be."""
    each = WORK.spec.num_layers // len(stages)
    made = tuple(
        StagePlan(mesh=mesh, layers=(n * each, (n + 1) * each), precision="bf16", device="cuda")
        for n, mesh in enumerate(stages)
    )
    line = PipelinePlan(stages=made, samples=samples, microbatch=samples, schedule="gpipe")
    return Plan(num_layers=WORK.spec.num_layers, pipelines=(line,))


def seconds(asked: Plan, gbit: float, latency_ms: float = 1.0) -> float:
    return Problem(WORK, two_sites(gbit, latency_ms)).time(asked).step_s


ALL = range(4)
MESHES = {
    "dp": Mesh.of(ALL, dp=4),
    "tp": Mesh.of(ALL, tp=4),
    "cp": Mesh.of(ALL, cp=4),
    "both": Mesh.of(ALL, dp=2, tp=2),
    "turned": Mesh.of((0, 2, 1, 3), dp=2, tp=2),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_slower_way_and_a_longer_one_take_longer(mesh: str) -> None:
    asked = plan(MESHES[mesh])
    fast, slow, far = seconds(asked, 100), seconds(asked, 1), seconds(asked, 100, 500.0)
    assert slow > 5 * fast and far > fast + 0.5, (fast, slow, far)


def test_one_mesh_takes_as_long_as_pipelines_that_send_the_same() -> None:
    """Each on a chip, side by side, they add up the same gradients over the same way."""
    (whole,) = plan(Mesh.of(ALL, dp=4)).pipelines
    (stage,) = whole.stages
    lines = tuple(
        replace(whole, stages=(replace(stage, mesh=Mesh((rank,))),), samples=4, microbatch=4)
        for rank in ALL
    )
    apart = Plan(num_layers=4, pipelines=lines)
    assert seconds(plan(Mesh.of(ALL, dp=4)), 1) == pytest.approx(seconds(apart, 1), rel=0.03)


def test_a_border_between_meshes_that_are_each_at_both_sites() -> None:
    halves = Mesh.of((0, 2), dp=2), Mesh.of((1, 3), dp=2)
    apart = Mesh.of((0, 1), dp=2), Mesh.of((2, 3), dp=2)
    slow, fast = (seconds(plan(*halves), gbit) for gbit in (1, 100))
    assert slow > 5 * fast
    assert seconds(plan(*apart), 1) < slow


def test_which_axes_are_far_apart() -> None:
    cluster = two_sites(1)
    assert sites_along_axes(Mesh.of((0, 1), dp=2), cluster) == ()
    assert sites_along_axes(MESHES["both"], cluster) == (("dp", (2,)),)
    assert sites_along_axes(MESHES["turned"], cluster) == (("tp", (2,)),)


def test_tokens_to_experts_at_another_site_wait_for_the_way() -> None:
    fabric = Knowledge().hardware_of(two_sites(1).pools[0]).fabric
    near, far = Group(4, 1), Group(4, 1, (2,))
    sends = [fabric.dispatch_seconds(1e6, 2, each, alone=True) for each in (near, far)]
    assert sends[1] > 100 * sends[0]
    way = WayOut.of(two_sites(1).sites[0])
    assert sends[1] == pytest.approx(1e6 / way.bytes_s + way.latency_s, rel=0.01)
