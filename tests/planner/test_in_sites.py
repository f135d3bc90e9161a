"""Clusters with sites: what links between them cost, and plans in which sites train apart."""

from dataclasses import replace
from pathlib import Path

import pytest
from planner.told import Told

from weft.cli.plan.forecasts import Answer, answer, load_for_cluster
from weft.cluster.cluster import catalogue
from weft.cluster.cluster_file import read_view
from weft.cluster.view import ChipPool, ClusterView, Site
from weft.config.errors import ConfigError
from weft.config.sections import SitesConfig
from weft.cost.choice import Group, StageChoice
from weft.cost.sends import border_times, far_between
from weft.cost.traffic import NETWORK_REACHED
from weft.cost.work import StageWork
from weft.models.llama.sizes import SIZES
from weft.planner.in_sites import apart, least_apart, search_in_sites
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, Watch, search
from weft.planner.search.least import Relaxed
from weft.simulate.step import Knowledge

TWO_SITES = Path(__file__).parents[2] / "examples/clusters/two-sites.yaml"
FAR = read_view(TWO_SITES)
RATE = 1e9 / 8 * NETWORK_REACHED
"""Bytes a second of a site's way out."""
WORK = Workload(spec=replace(SIZES["llama3-8b"], num_layers=8), seq_len=4096, samples=512)
OPTIONS = Options(domains=True, schedules=("1f1b",), recompute=("off",))
MODEL = ("model.size=llama3-8b", "data.seq_len=4096", "batch.samples=256", "model.num_layers=4")


def test_links_between_sites() -> None:
    """All that leaves a site goes one way, once for each element in each direction."""
    assert [site.name for site in FAR.sites] == ["north", "south"]
    assert [FAR.reach(ranks) for ranks in ((0, 7), (7, 8), (31, 32))] == ["node", "across", "sites"]
    fabric = Knowledge().hardware_of(FAR.pools[0]).fabric
    far, near = Group(64, 1, (2,)), Group(64)
    took = replace(fabric, piece_bytes=0).seconds("reduce_scatter", 1e9, far)
    assert took == pytest.approx(1e9 / RATE * 63 / 64, rel=0.01) and took > 2 * 10e-3
    assert fabric.seconds("reduce_scatter", 1e9, near) < took / 1000
    way = far_between(FAR.sites, [(0, 1)], (0, 1), times=3)
    border = border_times(1e9, (1 / 8, 1 / 8), (fabric, fabric), reach="sites", far=way)
    assert (border.transfer_s, border.latency_s) == pytest.approx((3e9 / RATE, 10e-3))


def test_who_holds_the_same_at_two_sites() -> None:
    work = StageWork(layers=(0, 1), embeds=False, predicts=False, samples=1, seq_len=1)
    choice = StageChoice(work=work, axes=(("dp", 32),), pipelines=2, sites=(2,))
    assert choice.holders(8).sites == (2,)
    by_site = choice._replace(shard_ways=32)
    assert by_site.parts(by_site.holders(8)) == (Group(32, 1, (1,)), Group(2, 32, (2,)))
    assert choice._replace(pipelines=1).holders(8) == Group(32, 1, (2,)), "one mesh at both"


def test_no_slower_than_when_each_site_is_written_as_a_node() -> None:
    """There is a level above the node, and below the link between sites."""
    problem = Problem(WORK, FAR, options=OPTIONS)
    as_nodes = ClusterView(
        tuple(
            replace(pool, num_nodes=1, chips_per_node=32, network_gbit_s=1 / 32, site=None)
            for pool in FAR.pools
        )
    )
    other = search(problem.on(as_nodes)).best
    most_s = problem.time(other.plan).step_s * (1 + 1e-9)
    found = search(problem, watch=Told(most_s)).best
    assert found.time.step_s <= most_s
    flat = ClusterView((replace(FAR.pools[0], num_nodes=8, network_gbit_s=1 / 8, site=None),))
    assert search(problem.on(flat)).best.time.step_s > 3 * found.time.step_s


def test_the_site_that_cannot_hold_the_model_is_named() -> None:
    north, south = FAR.pools
    small = replace(south, chip=replace(south.chip, memory_gib=1.0))
    problem = Problem(WORK, ClusterView((north, small)), options=OPTIONS)
    with pytest.raises(NoPlan, match=r"enough memory.* at site south, which trains for itself"):
        search_in_sites(problem, SitesConfig(every=50))


def test_sites_apart_share_samples_by_speed() -> None:
    north, south = FAR.pools
    slower = replace(south, num_nodes=2)
    problem = Problem(WORK, ClusterView((north, slower)), options=OPTIONS)
    asked = SitesConfig(every=50, wire="bf16", fragments=2)
    best = search_in_sites(problem, asked).best
    first_ranks, others = best.plan.sites
    assert len(others) == 16 and len(first_ranks) in (31, 32), "each has 11 of 341 samples"
    assert (*first_ranks, *others) == tuple(range(len(first_ranks) + 16))
    first, second = best.plan.pipelines
    assert first.samples == pytest.approx(2 * second.samples, rel=0.1)
    reached = apart(best.plan, problem.on(best.cluster), asked)
    params = 8 * 218_112_000 + 2 * 128256 * 4096 + 4096
    assert reached.meeting_s == pytest.approx(2 * params / RATE + 2 * 10e-3, rel=1e-6)
    late = apart(best.plan, problem.on(best.cluster), asked.model_copy(update={"delay": 49}))
    assert late.meeting_s == 0
    assert late.tokens_per_s == pytest.approx(512 * 4096 / best.time.step_s)


def test_of_few_samples_each_site_has_what_ends_soonest() -> None:
    """By speed the small site had a sample too many and all waited for it; and the bound was one
    of those shares alone."""
    kinds = catalogue()
    sites = [Site(name, chips, gbit_s=1.0, latency_s=0.0) for name, chips in (("a", 3), ("b", 1))]
    pools = (
        ChipPool(chip=kinds["A100-SXM4-80GB"], num_nodes=1, chips_per_node=3, site=sites[0]),
        ChipPool(chip=kinds["RTX4090"], num_nodes=1, chips_per_node=1, site=sites[1]),
    )
    work = Workload(spec=SIZES["qwen2.5-0.5b"], seq_len=2048, samples=13, precision="bf16")
    problem = Problem(work, ClusterView(pools))
    found = search_in_sites(problem, SitesConfig(every=100))

    def alone(number: int, samples: int) -> float:
        share = replace(problem, workload=replace(work, samples=samples))
        return search(share.on(ClusterView(pools[number : number + 1]))).best.time.step_s

    least = min(max(alone(0, 13 - n), alone(1, n)) for n in (1, 2, 3))
    assert found.best.time.step_s == pytest.approx(least, rel=1e-9)
    assert [pipeline.samples for pipeline in found.best.plan.pipelines] == [12, 1]
    assert 0.5 * least < found.bound_s <= least
    assert not found.exhausts and found.considered == found.simulated + found.pruned.total


@pytest.mark.parametrize("samples", [3, 13, 24])
@pytest.mark.parametrize("chips", [(3, 1), (8, 8)])
def test_the_bound_of_sites_apart_holds_for_every_share(
    samples: int, chips: tuple[int, int]
) -> None:
    """Against what each site takes at least with each; of many samples it is near that."""
    a100 = catalogue()["A100-SXM4-80GB"]
    pools = [ChipPool(chip=a100, num_nodes=1, chips_per_node=number) for number in chips]
    work = Workload(spec=SIZES["qwen2.5-0.5b"], seq_len=2048, samples=samples)

    def of_site(number: int, share: int) -> Problem:
        one = Problem(replace(work, samples=share), ClusterView((pools[number],)))
        return replace(one, options=Options(schedules=("1f1b",)))

    def least_s(number: int, share: int) -> float:
        return Relaxed(of_site(number, share)).least_s([0])

    least = min(max(least_s(0, n), least_s(1, samples - n)) for n in range(1, samples))
    found = least_apart([of_site(number, samples) for number in (0, 1)])
    assert 0.95 * least < found <= least * (1 + 1e-6)


def test_weft_plan_says_both_and_takes_the_exact_one() -> None:
    narrow = "plan.schedule=1f1b", "compute.recompute=off"

    def plan(*more: str) -> Answer:
        loaded = load_for_cluster("demo", [*MODEL, *narrow, *more])
        return answer(loaded, TWO_SITES, None, watch=Watch(), explain=False)

    exact, asked = plan(), plan("sites={every: 100, delay: 99}")
    assert exact.outlook is not None and exact.outlook.apart is not None
    assert not exact.file.plan.sites
    assert "sites.every=500 asks for it" in exact.outlook.apart.words
    assert exact.outlook.apart.gain is not None and 1.2 < exact.outlook.apart.gain < 2
    assert exact.as_json()["sites"]["exact_step_time_s"] == exact.outlook.forecast.step_s
    assert len(asked.file.plan.sites) == 2
    assert [used.pool for used in asked.file.chips] == [0, 1]
    assert asked.as_json()["sites"]["gain"] is None
    assert asked.as_json()["predicted"]["step_time_s"] == exact.outlook.apart.step_s


@pytest.mark.parametrize(
    ("cluster", "asked", "samples", "key"),
    [
        (FAR, SitesConfig(pipelines=((0,), (1,))), 8, "sites.pipelines"),
        (FAR.farthest_sites[FAR.sites[0]], SitesConfig(), 8, "sites"),
        (FAR, SitesConfig(), 1, "batch.samples"),
    ],
)
def test_sites_that_cannot_be(
    cluster: ClusterView, asked: SitesConfig, samples: int, key: str
) -> None:
    with pytest.raises(ConfigError) as found:
        search_in_sites(Problem(replace(WORK, samples=samples), cluster), asked)
    assert found.value.key == key
