"""Every schedule ends, does each action once, and keeps what its paper says it keeps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, ScheduleName, StagePlan
from weft.schedules.action import Action, Schedule, awaited
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import expected_positions, schedule_of
from weft.schedules.validity import prove

NAMES: list[ScheduleName] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16)]


def pipeline(name: ScheduleName, num_positions: int, num_microbatches: int) -> PipelinePlan:
    meshes = [Mesh.of((p,), dp=1) for p in range(num_positions)]
    if name in ("zb-v", "dualpipe-v"):
        meshes += meshes[::-1]
    elif name == "interleaved":
        meshes *= 2
    stages = tuple(StagePlan(mesh=mesh, layers=(0, 0)) for mesh in meshes)
    return PipelinePlan(stages=stages, samples=num_microbatches, microbatch=1, schedule=name)


def length(schedule: Schedule) -> int:
    """Time of the whole: F, I and W take 1, B takes 2; sending takes none."""
    num_stages = 1 + max(a.stage for actions in schedule for a in actions)
    split = any(a.kind == "W" for actions in schedule for a in actions)
    ended: dict[Action, int] = {}
    free = [0] * len(schedule)
    for action in in_order(schedule):
        position = next(n for n, actions in enumerate(schedule) if action in actions)
        ready = [ended[Action(*key)] for key in awaited(action, num_stages, split=split)]
        start = max([free[position], *ready])
        ended[action] = free[position] = start + (2 if action.kind == "B" else 1)
    return max(free)


def held(schedule: Schedule) -> tuple[int, ...]:
    """Most forward results that each position keeps: from a forward to the end of its backward."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return tuple(max(accumulate(change[a.kind] for a in actions)) for actions in schedule)


def in_order(schedule: Schedule) -> Sequence[Action]:
    stages = [sorted({a.stage for a in actions}) for actions in schedule]
    microbatches = 1 + max(a.microbatch for actions in schedule for a in actions)
    return prove(schedule, stages, microbatches)


@pytest.mark.parametrize(("num_positions", "num_microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_valid_for_any_number_of_microbatches(
    name: ScheduleName, num_positions: int, num_microbatches: int
) -> None:
    plan = pipeline(name, num_positions, num_microbatches)
    assert plan.positions() == expected_positions(plan)
    prove(schedule_of(plan), plan.positions(), num_microbatches)
    limit = {
        "gpipe": num_microbatches,
        "1f1b": num_positions,
        "interleaved": 3 * num_positions - 1,
        "zb-h1": num_positions,
        "zb-v": 2 * num_positions,
        "dualpipe-v": 2 * num_positions + 1,
    }
    assert max(held(schedule_of(plan))) <= limit[name]


def test_1f1b_by_hand() -> None:
    first, second = schedule_of(pipeline("1f1b", 2, 3))
    assert " ".join(map(str, first)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert " ".join(map(str, second)) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"


def test_in_flight_by_hand() -> None:
    plan = replace(pipeline("1f1b", 2, 4), in_flight=(3, 1))
    first, last = (" ".join(map(str, actions)) for actions in schedule_of(plan))
    assert first == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert last == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"


@pytest.mark.parametrize("seed", range(40))
def test_any_numbers_in_flight_end_and_are_kept(seed: int) -> None:
    """And no position holds more, as memory is told too; the usual numbers make the usual lists."""
    rng = random.Random(seed)
    positions, many = rng.randint(2, 8), rng.randint(1, 40)
    counts = tuple(sorted((rng.randint(1, many) for _ in range(positions)), reverse=True))
    plan = replace(pipeline("1f1b", positions, many), in_flight=counts)
    schedule = schedule_of(plan)
    in_order(schedule)
    assert held(schedule) == counts
    assert held_at_peak(Pattern.of(plan)) == tuple((count,) for count in counts)
    usual = tuple(range(positions, 0, -1))
    assert schedule_of(replace(plan, in_flight=usual)) == schedule_of(replace(plan, in_flight=()))


def test_zb_h1_by_hand() -> None:
    first, second = schedule_of(pipeline("zb-h1", 2, 3))
    assert " ".join(map(str, first)) == "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2"
    assert " ".join(map(str, second)) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"


def test_dualpipe_v_by_hand() -> None:
    """Stages 0 and 3 on the first position: both ways in turns, weights put off at the end."""
    first, _ = schedule_of(pipeline("dualpipe-v", 2, 4))
    assert " ".join(map(str, first)) == (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 "
        "F0.3 I3.1 W3.1 F3.2 I0.0 W0.0 I3.2 W3.2 F3.3 I0.1 W0.1 "
        "I3.3 I0.2 W3.3 I0.3 W0.2 W0.3"
    )


def test_each_position_of_1f1b_holds_one_less() -> None:
    plan = pipeline("1f1b", 4, 8)
    assert held(schedule_of(plan)) == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", 3 * 3),  # (p - 1) (F + B)
        ("1f1b", 3 * 3),
        ("interleaved", 3 * 3 / 2),  # (p - 1) (F + B) / chunks
        ("zb-h1", 3),  # (p - 1) (F + B - 2 W)
        ("zb-v", 3 / 2),  # the position at the turn begins that late
        ("dualpipe-v", 3 / 2),  # half of (p - 1) (F&B + B - 3 W) / chunks: I is sent before W
    ],
)
def test_bubbles_are_those_of_the_papers(name: ScheduleName, bubble: float) -> None:
    """Four positions, eight microbatches; two stages a position count half each."""
    schedule = schedule_of(pipeline(name, 4, 8))
    chunks = len({action.stage for action in schedule[0]})
    assert length(schedule) / chunks - 3 * 8 == bubble


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_zero_bubble_idles_less(num_microbatches: int) -> None:
    idle = {
        name: length(schedule_of(pipeline(name, 4, num_microbatches))) / chunks
        - 3 * num_microbatches
        for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2))
    }
    assert idle["zb-v"] < idle["zb-h1"] < idle["1f1b"]


BROKEN: dict[str, tuple[str, Callable[[list[list[Action]]], None]]] = {
    "missing": ("F0.1 is not done exactly once", lambda s: s[0].remove(Action("F", 0, 1))),
    "twice": ("F0.0 is not done exactly once", lambda s: s[0].append(Action("F", 0, 0))),
    "misplaced": ("F1.0 is not done exactly once", lambda s: s[0].append(Action("F", 1, 0))),
    "deadlock": ("the schedule never ends: position 0 at B0.1", lambda s: s[0].reverse()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_refused(name: str) -> None:
    message, damage = BROKEN[name]
    plan = pipeline("gpipe", 2, 2)
    schedule = schedule_of(plan)
    damage(schedule)
    with pytest.raises(ValueError, match=message):
        prove(schedule, plan.positions(), 2)
