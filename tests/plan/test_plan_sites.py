"""Sites in a plan: whole pipelines, in its JSON, from a configuration, and refused."""

import json
from dataclasses import replace

import pytest

from weft.config.errors import ConfigError
from weft.config.sections import SitesConfig
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.plan.plan_file import PlanFile
from weft.planner.sites import refuse_idle_fragments, with_sites, without_lost
from weft.planner.validate import refuse_idle_zero, validate_plan


def plan(*sizes: int, zero: ZeroLevel = 0, precision: str = "fp32", sites: object = ()) -> Plan:
    """Pipelines of one stage; of each the number of its ranks."""
    pipelines, first = [], 0
    for size in sizes:
        mesh = Mesh.of(range(first, first + size), dp=size)
        stage = StagePlan(mesh=mesh, layers=(0, 2), zero=zero, precision=precision)
        pipelines.append(PipelinePlan(stages=(stage,), samples=4, microbatch=4))
        first += size
    return Plan(num_layers=2, pipelines=tuple(pipelines), sites=sites)  # type: ignore[arg-type]


def check(plan: Plan) -> None:
    validate_plan(plan, num_layers=2, global_batch=plan.global_batch)
    refuse_idle_zero(plan, tied=False)


def test_json_keeps_sites_and_says_nothing_of_one() -> None:
    apart, one = plan(2, 1, sites=((2,), (0, 1))), plan(2, 1)
    assert Plan.from_json(apart.to_json()) == PlanFile.read(apart.to_json()).plan == apart
    assert "sites" not in json.loads(one.to_json())
    assert apart.on_ranks([1, 2, 0]).sites == ((0,), (1, 2))


def test_a_site_is_a_plan_of_its_own() -> None:
    apart = plan(2, 1, 1, sites=((0, 1, 3), (2,)))
    check(apart)
    first, second = apart.by_site()
    assert (first.ranks, second.ranks) == ((0, 1, 3), (2,))
    assert first == apart.site(3) == replace(plan(2, 1, 1), pipelines=apart.pipelines[::2])
    assert plan(2, 1).by_site() == [plan(2, 1)]
    every = (part for rank in range(4) for part in apart.rank_plan(rank).microbatches())
    assert sorted(sample for part in every for sample in part) == list(range(12)), "no data twice"


def test_pipelines_of_a_configuration() -> None:
    three, asked = plan(2, 1, 1), SitesConfig()
    assert with_sites(three, None) is three
    assert with_sites(three, asked).sites == ((0, 1), (2,), (3,))
    two = with_sites(three, SitesConfig(pipelines=((1,), (2, 0))))
    assert two.sites == ((2,), (0, 1, 3))
    assert with_sites(two, asked) == two, "a plan's file says it"
    assert with_sites(two, SitesConfig(pipelines=((0, 2), (1,)))) == two
    for of, pipelines, key, problem in (
        (
            two,
            ((0,), (1, 2)),
            "sites.pipelines",
            r"or the plan's own sites, \[\[2\], \[0, 1, 3\]\]",
        ),
        (three, ((0,), (1,)), "sites.pipelines", "the pipelines 0 to 2, each in one site"),
        (three, ((0, 1), (1, 2)), "sites.pipelines", "the pipelines 0 to 2, each in one site"),
        (three, ((0, 1, 2), ()), "sites.pipelines", "the pipelines 0 to 2, each in one site"),
        (plan(2), None, "sites.pipelines", "two sites or more"),
    ):
        with pytest.raises(ConfigError, match=problem) as found:
            with_sites(of, SitesConfig(pipelines=pipelines))
        assert found.value.key == key
    with pytest.raises(ConfigError, match="the plan has sites") as found:
        with_sites(two, None)
    assert found.value.key == "sites"
    refuse_idle_fragments(SitesConfig(fragments=4), 4)
    with pytest.raises(ConfigError, match="at most 4") as found:
        refuse_idle_fragments(SitesConfig(fragments=5), 4)
    assert found.value.key == "sites.fragments"


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (plan(2, 1, sites=((0, 1, 2),)), "two sets of ranks or more"),
        (plan(2, 1, sites=((0, 1, 2), ())), "two sets of ranks or more"),
        (plan(2, 1, sites=((0,), (1, 2))), "whole pipelines: ranks \\[0, 1\\] are one"),
        (plan(2, 1, sites=((0, 1), (1, 2))), "the ranks 0 to 2, each in one site"),
        (plan(2, 1, sites=((0, 1), (2, 3))), "the ranks 0 to 2, each in one site"),
        (plan(2, 1, sites=((0, 1), ("2",))), "a value of type int"),
        (replace(plan(1, 1, sites=((0,), (1,))), domains=((0,), (1,))), "none with sites"),
        (plan(1, 1, precision="fp16", sites=((0,), (1,))), "bf16 or fp32 with sites"),
        (plan(2, 1, zero=1, sites=((0, 1), (2,))), "No other rank holds"),
    ],
)
def test_what_sites_cannot_be(of: Plan, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(of)


def test_zero_3_is_a_sites_own() -> None:
    check(plan(2, 2, zero=3, sites=((0, 1), (2, 3))))
    with pytest.raises(ConfigError, match="2 at most beside other pipelines"):
        check(plan(2, 2, 2, zero=3, sites=((0, 1), (2, 3, 4, 5))))


def test_what_is_left_alone_divides_nothing() -> None:
    left, ranks = without_lost(plan(1, 1, 1, zero=1, sites=((0, 1), (2,))), [0, 2])
    check(left)
    assert ranks == (0, 2) and {stage.zero for _, _, stage in left.stages()} == {0}
    kept, _ = without_lost(plan(2, 1, 1, zero=1, sites=((0, 1), (2, 3))), [0, 1, 3])
    assert [stage.zero for _, _, stage in kept.stages()] == [1, 0]
