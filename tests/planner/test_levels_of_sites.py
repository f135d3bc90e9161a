"""Sites inside sites: racks, pods, regions, to any depth."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cluster.cluster_file import read_view
from weft.cluster.view import ChipPool, ClusterView, Site, count_by_level, hops_between
from weft.config.sections import SitesConfig
from weft.cost.choice import Group, StageChoice
from weft.cost.sends import border_times, far_between
from weft.cost.traffic import NETWORK_REACHED
from weft.cost.work import StageWork
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.in_sites import meeting, search_in_sites
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.domains import domains_of_kinds
from weft.simulate.step import Knowledge

PODS = read_view(Path(__file__).parents[2] / "examples/clusters/pods.yaml")
NORTH_1, NORTH_2, SOUTH_1, SOUTH_2 = PODS.sites
NORTH, SOUTH = PODS.farthest_sites
GBIT = 1e9 / 8 * NETWORK_REACHED
WORK = Workload(spec=replace(SIZES["llama3-8b"], num_layers=8), seq_len=4096, samples=64)
SMALL = [replace(pool, num_nodes=1, chips_per_node=2) for pool in PODS.pools]
FEW_LAYERS = replace(WORK, spec=replace(WORK.spec, num_layers=4), samples=8)
OPTIONS = Options(domains=True, schedules=("1f1b",), recompute=("off",))


def test_who_is_where() -> None:
    assert [site.name for site in (NORTH, SOUTH)] == ["north", "south"]
    assert (NORTH_1.num_chips, NORTH.num_chips) == (16, 32)
    assert hops_between(NORTH_1, NORTH_1) == () == hops_between(None, None)
    assert hops_between(NORTH_1, NORTH_2) == (frozenset((NORTH_1, NORTH_2)),)
    both = frozenset((NORTH, SOUTH)), frozenset((NORTH_2, SOUTH_1))
    assert hops_between(NORTH_2, SOUTH_1) == both
    assert hops_between(NORTH, SOUTH_1) == (both[0], frozenset((SOUTH_1,)))
    assert count_by_level(PODS.sites) == (4, 2)
    assert count_by_level((NORTH_1, NORTH_2)) == (2, 1)
    assert count_by_level((None, None)) == ()
    assert [len(part.pools) for part in PODS.farthest_sites.values()] == [2, 2]
    assert [*PODS.farthest_sites[NORTH].farthest_sites] == [NORTH_1, NORTH_2]
    fast = SOUTH_1.faster(2)
    assert fast.within is not None and (fast.gbit_s, fast.within.gbit_s) == (200, 2)


def test_a_border_takes_every_way_between_its_ends() -> None:
    """The slowest for long; every one's latency. What shares a way is counted there alone."""
    fabric = Knowledge().hardware_of(PODS.pools[0]).fabric

    def seconds(*ends: int) -> tuple[float, float]:
        far = far_between(PODS.sites, [(0, 1), (1, 2), (2, 3), (0, 3)], (ends[0], ends[1]), times=2)
        times = border_times(1e9, (1.0, 1.0), (fabric, fabric), reach="sites", far=far)
        return times.transfer_s, times.latency_s

    # Two pipelines; both borders between regions share that way, each pair of pods has its own.
    assert seconds(0, 1) == pytest.approx((2 * 1e9 / (100 * GBIT), 0.05e-3))
    assert seconds(1, 2) == pytest.approx((2 * 2 * 1e9 / GBIT, 10.05e-3))
    assert far_between(PODS.sites, [(0, 1)], (2, 2), times=1) is None


def test_sums_over_all_of_them() -> None:
    """A ring leaves each pod and each region once; the slowest of all rates counts."""
    fabric = replace(Knowledge().hardware_of(PODS.pools[0]).fabric, piece_bytes=0)
    whole = Group(64, 1, (4, 2))
    took = fabric.seconds("reduce_scatter", 1e9, whole)
    late = 4 * 0.05e-3 + 2 * 10e-3
    assert took == pytest.approx(1e9 / GBIT * 63 / 64 + late, rel=1e-3)
    pods = fabric.seconds("reduce_scatter", 1e9, Group(32, 1, (2, 1)))
    assert pods == pytest.approx(1e9 / (100 * GBIT) * 31 / 32 + 2 * 0.05e-3, rel=0.02)
    assert fabric.seconds("all_reduce", 1.0, whole) == pytest.approx(
        2 * (2 * 0.05e-3 + 10e-3), rel=0.02
    ), "a tree takes fewer turns"
    work = StageWork(layers=(0, 1), embeds=False, predicts=False, samples=1, seq_len=1)
    choice = StageChoice(work=work, axes=(("dp", 16),), pipelines=4, sites=(4, 2))
    holders = choice.holders(8)
    by_region = choice._replace(shard_ways=32).parts(holders)
    assert [group.sites for group in by_region] == [(2, 1), (2, 2)]
    by_pod = choice._replace(shard_ways=16).parts(holders)
    assert [group.sites for group in by_pod] == [(1, 1), (4, 2)]
    few = choice._replace(axes=(("dp", 1),), pipelines=2, zero=1)
    assert few.parts(few.holders(8))[0].sites == (2, 2), "no more than there are ranks"


def test_sites_of_unlike_depths() -> None:
    """Counted from the outermost, so that nothing leaves what all are in."""
    region = Site("region", 48, 1, 1.0)
    pod = Site("pod", 32, 100, 0.0, region)
    racks = [replace(NORTH_1, name=f"rack-{n}", within=pod) for n in range(2)]
    beside = replace(NORTH_1, name="beside", within=region)
    assert count_by_level([*racks, beside]) == (3, 2, 1)
    assert count_by_level([*racks, region]) == (3, 2, 1), "nodes of its own that are in no pod"
    for place in (beside, racks[0], region):
        fabric = Knowledge().hardware_of(replace(PODS.pools[0], site=place)).fabric
        took = fabric.seconds("all_gather", 1e9, Group(48, 1, (3, 2, 1)))
        assert took < 1.0, "over the region's way out it would be 10 s"


def few(site: Site) -> Site:
    """With two chips, and four in both pods of a region."""
    outer = site.within and replace(site.within, num_chips=4)
    return replace(site, num_chips=2, within=outer)


def in_pods(pools: Iterable[ChipPool], known: Mapping[str, Site]) -> ClusterView:
    return ClusterView(tuple(replace(p, site=known[p.site.name]) for p in pools if p.site))


def flat(cluster: ClusterView) -> ClusterView:
    """Written with pods alone."""
    alone = {site.name: replace(site, within=None) for site in cluster.sites}
    return in_pods(cluster.pools, alone)


def test_no_slower_than_what_is_found_when_a_level_is_left_out() -> None:
    """Whoever writes pods alone is promised what the way between regions cannot keep."""
    known = {site.name: few(site) for site in PODS.sites}
    cluster = in_pods(SMALL[:3], known)
    problem = Problem(FEW_LAYERS, cluster, options=replace(OPTIONS, domains=False, zero=(2,)))
    best = search(problem).best
    again = problem.on(best.cluster).time(best.plan).step_s
    assert again == pytest.approx(best.time.step_s), "as a plan that is given is priced"
    promised = search(problem.on(flat(cluster))).best
    there = problem.on(in_pods(promised.cluster.pools, known)).time(promised.plan).step_s
    assert promised.time.step_s < best.time.step_s < there


def test_domains_of_every_level() -> None:
    stage = StagePlan(mesh=Mesh.of(range(16), dp=16), layers=(0, 8))
    pipelines = tuple(
        PipelinePlan(
            stages=(replace(stage, mesh=Mesh.of(range(first, first + 16), dp=16)),),
            samples=16,
            microbatch=16,
        )
        for first in range(0, 64, 16)
    )
    plan = Plan(num_layers=8, pipelines=pipelines)
    found = {each.kind: len(each.plan.domains) for each in domains_of_kinds(plan, PODS)}
    assert found == {"pipeline": 4, "kind of chip": 2, "node": 8}, "each set of domains once"
    alike = [replace(pool, chip=PODS.pools[0].chip) for pool in PODS.pools]
    found = {e.kind: len(e.plan.domains) for e in domains_of_kinds(plan, ClusterView((*alike,)))}
    assert found == {"pipeline": 4, "node": 8, "site, 1 level out": 2}


def test_regions_train_apart_and_pods_together() -> None:
    small = in_pods(SMALL, {site.name: few(site) for site in PODS.sites})
    problem = Problem(FEW_LAYERS, small, options=OPTIONS)
    found = search_in_sites(problem, SitesConfig(every=50)).best
    assert len(found.plan.sites) == 2
    names = [pool.site.around[-1].name for pool in found.cluster.pools if pool.site]
    assert [*dict.fromkeys(names)] == ["north", "south"]


def test_a_site_with_nodes_of_its_own_and_sites_inside() -> None:
    """Each pool trains at one place, and nobody meets over a way out that leads elsewhere."""
    region = Site("region", 6, 0.001, 1.0)
    places = (region, *(Site(f"pod-{n}", 2, 100, 0.0, region) for n in (1, 2)))
    pool = replace(PODS.pools[0], num_nodes=1, chips_per_node=2)
    cluster = ClusterView(tuple(replace(pool, site=place) for place in places))
    apart = {site: part.world_size for site, part in cluster.farthest_sites.items()}
    assert apart == dict.fromkeys(places, 2)
    stage = StagePlan(mesh=Mesh.of((0, 1), dp=2), layers=(0, 8))
    meshes = [replace(stage, mesh=Mesh.of((n, n + 1), dp=2)) for n in (0, 2, 4)]
    pipelines = tuple(PipelinePlan(stages=(one,), samples=2, microbatch=1) for one in meshes)
    plan = Plan(num_layers=8, pipelines=pipelines, sites=((0, 1), (2, 3), (4, 5)))
    took = meeting(plan, Problem(WORK, cluster), SitesConfig(every=50), 1.0)
    assert took == pytest.approx(2 * 4 * 2.8e9 / (100 * GBIT), rel=0.01), "fp32, to two others"


def test_three_levels() -> None:
    """Of any depth: the way out of the outermost is the last."""
    world = Site("world", 64, 0.1, 0.1)
    deep = ClusterView(
        tuple(
            replace(pool, site=replace(pool.site, within=replace(pool.site.within, within=world)))
            for pool in PODS.pools
            if pool.site is not None and pool.site.within is not None
        )
    )
    assert [site.name for site in deep.farthest_sites] == ["north", "south"], "all are in one world"
    assert count_by_level(deep.sites) == (4, 2, 1)
    hops = hops_between(deep.sites[0], deep.sites[3])
    assert [len(hop) for hop in hops] == [2, 2]
    fabric = Knowledge().hardware_of(deep.pools[0]).fabric
    near = Knowledge().hardware_of(PODS.pools[0]).fabric
    whole, deeper = Group(64, 1, (4, 2)), Group(64, 1, (4, 2, 1))
    assert fabric.seconds("all_gather", 1e9, deeper) == near.seconds("all_gather", 1e9, whole)
