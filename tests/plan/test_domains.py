"""Sets of ranks that fast links join: in a plan, in its JSON, from a configuration, and refused."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.plan.plan_file import PlanFile
from weft.planner.domains import idle_zero_notes, refuse_idle_domains, with_domains
from weft.planner.validate import validate_plan


def plan(*sizes: tuple[int, ...], zero: ZeroLevel = 0, domains: object = ()) -> Plan:
    """Pipelines of two layers; of each the ranks of its stages."""

    def pipelines() -> Iterator[PipelinePlan]:
        first = 0
        for each in sizes:
            stages = []
            for number, size in enumerate(each):
                ends = (2 * number // len(each), 2 * (number + 1) // len(each))
                mesh = Mesh.of(range(first, first + size), dp=size)
                device = "cpu" if first < 2 else "chipb"
                stages.append(StagePlan(mesh=mesh, layers=ends, zero=zero, device=device))
                first += size
            yield PipelinePlan(stages=tuple(stages), samples=4, microbatch=4)

    return Plan(num_layers=2, pipelines=tuple(pipelines()), domains=domains)  # type: ignore[arg-type]


def check(plan: Plan) -> None:
    validate_plan(plan, num_layers=2, global_batch=plan.global_batch)
    refuse_idle_domains(plan, tied=False)


def test_json_keeps_domains_and_says_nothing_of_one() -> None:
    apart, one = plan((2,), (2,), domains=((2, 3), (0, 1))), plan((2,), (2,))
    assert Plan.from_json(apart.to_json()) == PlanFile.read(apart.to_json()).plan == apart
    assert "domains" not in json.loads(one.to_json())
    assert Plan.from_json(one.to_json()) == one


def test_ranks_by_domain_in_the_order_of_domains() -> None:
    apart = plan((2,), (3,), domains=((4, 2), (0, 1), (3,)))
    assert apart.by_domain({3, 0, 2, 4}) == ((2, 4), (0,), (3,))
    assert apart.by_domain((1,)) == ((1,),)
    assert plan((2,), (3,)).by_domain((3, 0)) == ((0, 3),)
    assert apart.on_ranks([1, 0, 4, 3, 2]).domains == ((2, 4), (1, 0), (3,))


def test_words_of_a_configuration() -> None:
    two, one = plan((2, 1), (3,)), plan((2, 2))
    assert with_domains(two, "pipelines", None).domains == ((0, 1, 2), (3, 4, 5))
    assert with_domains(two, "families", None).domains == ((0, 1), (2, 3, 4, 5))
    assert with_domains(two, "nodes", 2).domains == ((0, 1), (2, 3), (4, 5))
    for asked, ranks_here, problem in (
        ("pipelines", None, "the plan has no several pipelines"),
        ("nodes", None, "the plan has no several nodes"),
        ("nodes", 3, "null where nodes have unlike numbers of the 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=problem) as found:
            with_domains(one, asked, ranks_here)  # type: ignore[arg-type]
        assert found.value.key == "plan.domains"


@pytest.mark.parametrize(
    ("domains", "problem"),
    [
        (((0, 1, 2, 3),), "two sets of ranks or more"),
        (((0, 1, 2, 3), ()), "two sets of ranks or more"),
        (((0, 1), (2,)), "the ranks 0 to 3, each once"),
        (((0, 1), (1, 2, 3)), "the ranks 0 to 3, each once"),
        (((0, 1), (2, "3")), "a value of type int"),
    ],
)
def test_what_is_no_division_of_the_ranks_is_refused(domains: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(plan((2,), (2,), domains=domains))


def test_domains_with_nothing_in_common_are_refused() -> None:
    apart = plan((2, 2), domains=((0, 1), (2, 3)))
    with pytest.raises(ConfigError, match="domains that hold parameters in common"):
        check(apart)
    refuse_idle_domains(apart, tied=True)
    check(plan((2, 2), domains=((0, 2), (1, 3))))


def test_zero_3_beside_other_pipelines_needs_a_copy_in_each() -> None:
    check(plan((2,), (2,), zero=3, domains=((0, 1), (2, 3))))
    check(plan((2, 2), (2,), zero=3, domains=((0, 1, 2, 3), (4, 5))))
    check(plan((4,), zero=3, domains=((0, 1), (2, 3))))
    three = plan((2,), (2,), (2,), zero=3, domains=((0, 1), (2, 3, 4, 5)))
    for refused in (replace(three, domains=()), three):
        with pytest.raises(ConfigError, match="let each keep a whole copy") as found:
            check(refused)
        assert found.value.key.endswith(".zero")


def test_zero_that_divides_nothing_in_its_domains_is_said() -> None:
    """Two pipelines of one rank each, of which a domain has one; two ranks are worth dividing."""
    idle = plan((1,), (1,), zero=1, domains=((0,), (1,)))
    words = "divides nothing: each domain holds these layers once"
    both = [f"pipelines[{p}].stages[0].zero = 1 {words}" for p in range(2)]
    assert list(idle_zero_notes(idle, tied=False)) == both
    assert not list(idle_zero_notes(idle, tied=True)), "the embedding is the head"
    assert not list(idle_zero_notes(replace(idle, domains=()), tied=False))
    half = plan((2,), (1,), zero=1, domains=((0, 1), (2,)))
    assert not list(idle_zero_notes(half, tied=False)), "of the first two"
    tp = StagePlan(mesh=Mesh.of(range(4), dp=2, tp=2), layers=(0, 2), zero=2)
    pipeline = PipelinePlan(stages=(tp,), samples=4, microbatch=4)
    nodes = Plan(num_layers=2, pipelines=(pipeline,), domains=((0, 1), (2, 3)))
    assert list(idle_zero_notes(nodes, tied=False)) == [f"pipelines[0].stages[0].zero = 2 {words}"]
