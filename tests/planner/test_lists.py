"""Lists in a plan: kept in its file, and refused where they cannot be done or do not fit."""

from dataclasses import replace

import pytest
from planner.test_in_flight import problem, resolved

from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.planner.fit import changes, shortages, smallest_change
from weft.planner.problem import Options
from weft.planner.search import search
from weft.planner.validate import validate_plan
from weft.schedules.known import Pattern, held_at_peak

TWO = "plan.stages=[{layers: 1}, {}]"
GOOD = ("4F 4(B F) 4B", "8(F B)")


def with_lists(*lists: str, schedule: str = "1f1b") -> Plan:
    """Two meshes, eight microbatches."""
    plan = resolved(TWO).plan
    pipeline = replace(plan.pipelines[0], lists=lists, schedule=schedule)
    return replace(plan, pipelines=(pipeline,))


def check(plan: Plan) -> None:
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)


def test_a_plan_file_keeps_them() -> None:
    plan = with_lists(*GOOD)
    check(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert "lists" not in resolved(TWO).plan.to_json()
    assert plan.pipelines[0].order == "1f1b with a list made for it"


@pytest.mark.parametrize(
    ("lists", "schedule", "message"),
    [
        (
            ("B F 7F 7B", "8(F B)"),
            "1f1b",
            "expected every action of 8 micro-batches, in a possible order. The schedule never "
            "ends: position 0 at B0.0; position 1 at F1.0. Leave lists out for those of 1f1b.",
        ),
        (("7F 7B", "8(F B)"), "1f1b", "Position 0: B0.7 is not done exactly once."),
        (("9F 9B", "9(F B)"), "1f1b", "Position 0: B0.8 is not done exactly once."),
        (("8F 8B", "8(F B"), "1f1b", "A bracket is not closed. Leave lists out"),
        (("8F 8B", "F1 8(F B)"), "1f1b", "F1 is of a stage that its mesh does not hold."),
        (("8F 8B",), "1f1b", "expected a list for each of 2 meshes."),
        (
            ("8F 8(I W)", "8(F I W)"),
            "1f1b",
            'expected F, B alone with the schedule "1f1b". Others have I, W: zb-h1, zb-v',
        ),
        (GOOD, "zb-h1", 'expected F, I, W alone with the schedule "zb-h1". Others have B: gpipe'),
    ],
)
def test_others_are_refused(lists: tuple[str, ...], schedule: str, message: str) -> None:
    plan = with_lists(*lists, schedule=schedule)
    with pytest.raises(ConfigError) as refused:
        check(plan)
    assert str(refused.value).startswith(f"pipelines[0].lists = {list(lists)!r}: expected")
    assert message in str(refused.value)


def test_the_planner_makes_them_where_they_save() -> None:
    """Two nodes behind a slow network: it takes less than any plan with a name, and fits."""
    asked = problem(gbit=20)
    free = replace(asked.options, schedules=Options().schedules)
    asked = replace(asked, options=free)
    named = search(replace(asked, options=replace(free, in_flight=False))).best
    found = search(asked).best
    (pipeline,) = found.plan.pipelines
    assert pipeline.lists
    assert found.time.step_s == asked.time(found.plan).step_s < named.time.step_s / 1.1
    assert not shortages(found.plan, asked)
    (room,) = asked.room(found.plan)
    held = held_at_peak(Pattern.of(pipeline))
    assert all(sum(each) <= most for each, most in zip(held, room, strict=True))
    check(found.plan)


def test_they_say_all_that_is_in_flight() -> None:
    plan = with_lists(*GOOD)
    both = replace(plan.pipelines[0], in_flight=(2, 1))
    with pytest.raises(ConfigError, match=r"expected none beside in_flight. Lists say what is"):
        check(replace(plan, pipelines=(both,)))


def test_one_that_passes_memory_is_short_of_it() -> None:
    """And what changes the number of microbatches leaves lists out."""
    roomy = problem(gbit=10)
    pipeline = replace(search(roomy).best.plan.pipelines[0], in_flight=(), lists=())
    plan, many = Plan(num_layers=4, pipelines=(pipeline,)), pipeline.num_microbatches
    need_gib = max(memory.total for memory in roomy.memory(plan).values()) / 2**30
    tight = problem(gbit=10, memory_gib=1.01 * need_gib / roomy.options.memory_part)
    assert not shortages(plan, tight)
    lists = (f"{many}F {many}B", f"{many}(F B)")
    short = replace(plan, pipelines=(replace(pipeline, lists=lists),))
    places = [f"pipelines[0].stages[{stage}]" for stage in range(2)]
    # The second keeps all that it handed back, which the first is known to have only at the end.
    assert [each.key for each in shortages(short, tight)] == places
    assert smallest_change(short, tight) == (
        "Leave out what is in flight beyond the schedule's own (lists, in_flight)."
    )
    halved = dict(changes(short))["Halve the micro-batches (batch.micro)"]
    assert halved.pipelines[0].lists == ()
