"""When receives may be posted: no deadlock on GPUs whose streams share queues of the hardware."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from random import Random

import pytest
from parallel.hardware_queues import Job, always_early
from parallel.test_releases import CASES, reachable, schedule

from weft.plan.plan import ScheduleName
from weft.schedules.action import Action, Schedule, awaited
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.clocks import Clocks
from weft.schedules.known import Pattern
from weft.schedules.one_forward_one_backward import one_forward_one_backward
from weft.schedules.receives import AHEAD, receives, soonest
from weft.schedules.registry import SCHEDULES, actions_of, placed
from weft.schedules.validity import prove

QUEUES = (1, 2, 4, 8)
SMALL = tuple(product((2, 3, 4), (1, 2, 3, 4, 6, 8)))
LARGE = ((5, 7), (6, 12), (7, 3), (8, 24))


def schedules(name: str, sizes: tuple[tuple[int, int], ...]) -> list[Schedule]:
    """Of so many positions and micro-batches; two stages on each where it may be any number."""
    made = SCHEDULES[name]
    chunks = 2 if made.any_chunks else made.chunks
    return [made.actions(p, p * chunks, m) for p, m in sizes]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_rank_gets_to_the_end_however_its_streams_share_queues(name: str) -> None:
    rng = Random(0)
    for actions in schedules(name, SMALL + LARGE):
        clocks = Clocks(actions)
        posts = receives(clocks)
        for num_queues in QUEUES:
            drawn = [rng.randrange(num_queues) for _ in range(64)]
            what = len(actions), len(actions[0]), num_queues
            assert Job(clocks, posts, lambda stream, q=num_queues: stream % q).ends(), what
            assert Job(clocks, posts, drawn.__getitem__).ends(), (*what, drawn)


@pytest.mark.parametrize(
    "name", [name for name, made in SCHEDULES.items() if made.receives_as_proven]
)
def test_usual_lists_start_receives_as_soon_as_is_proven(name: str) -> None:
    """What a position's memory is counted by without a play, also where pipelines never fill."""
    for actions in schedules(name, (*SMALL, *LARGE, (12, 2), (12, 11), (12, 13), (9, 26))):
        clocks = Clocks(actions)
        assert receives(clocks) == [soonest(clocks, p) for p in range(len(actions))]


def test_memory_at_borders_of_lists_of_others_is_counted_by_playing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say of themselves whether a receive may hold up another; unsaid, it may."""
    played: list[Clocks] = []

    def noted(clocks: Clocks) -> list[list[list[Action]]]:
        played.append(clocks)
        return receives(clocks)

    monkeypatch.setattr("weft.schedules.border_memory.receives", noted)
    SCHEDULES.add(replace(SCHEDULES["1f1b"], name="theirs", receives_as_proven=False))
    try:
        counted = [borders_at_peak(Pattern(name, 4, 4, 6)) for name in ("1f1b", "theirs")]
    finally:
        SCHEDULES.remove("theirs")
    assert len(played) == 1 and counted[0] == counted[1]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_so_it_does_with_parts_of_the_head(name: str) -> None:
    """On any of the positions, however many micro-batches are in flight."""
    rng, made = Random(1), SCHEDULES[name]
    chunks = 2 if made.any_chunks else made.chunks
    for p, m in (*SMALL, (5, 7), (4, 12)):
        heads = sorted(rng.sample(range(p), rng.randint(1, p)))
        more = [rng.randint(1, 8), *(rng.randint(0, 8) for _ in range(p - 1))]
        deep = [min(m, each) for each in accumulate(more)][::-1] if made.deeper else []
        actions = actions_of(name, p, p * chunks, m, in_flight=deep, heads=heads)
        prove(actions, placed(name, p, p * chunks, heads), m, heads=len(heads))
        clocks = Clocks(actions, heads=len(heads))
        posts = receives(clocks)
        for num_queues in QUEUES:
            drawn = [rng.randrange(num_queues) for _ in range(256)]
            assert Job(clocks, posts, drawn.__getitem__).ends(), (heads, deep, m, num_queues)


def test_with_every_receive_early_some_do_not() -> None:
    """What the test above is able to see."""
    lost = dict.fromkeys(QUEUES, 0)
    for actions in (each for name in SCHEDULES for each in schedules(name, SMALL)):
        clocks = Clocks(actions)
        posts = [always_early(clocks, position) for position in range(len(actions))]
        for num_queues in QUEUES:
            job = Job(clocks, posts, lambda stream, q=num_queues: stream % q)
            lost[num_queues] += not job.ends()
    assert lost[1] >= lost[2] > lost[4] > 0


def test_most_receives_stay_early() -> None:
    same = every = 0
    for actions in (each for name in SCHEDULES for each in schedules(name, SMALL)):
        clocks = Clocks(actions)
        for position in range(len(actions)):
            early = set(posts(always_early(clocks, position)))
            same += len(early.intersection(posts(receives(clocks)[position])))
            every += len(early)
    assert same / every > 0.8


def posts(lists: list[list[Action]]) -> list[tuple[int, Action]]:
    return [(number, action) for number, at in enumerate(lists) for action in at]


@pytest.mark.parametrize(("name", "positions", "num_microbatches"), CASES)
def test_as_early_as_its_sender_waits_for_nothing_to_come(
    name: ScheduleName, positions: int, num_microbatches: int
) -> None:
    lists = schedule(name, positions, num_microbatches)
    after, clocks = reachable(lists), Clocks(lists)
    for own, received in zip(lists, receives(clocks), strict=True):
        found = posts(received)
        assert [action for _, action in found] == [a for a in own if clocks.givers(a)]
        for number, action in found:
            (giver,), at = clocks.givers(action), list(own).index(action)
            assert giver not in after[own[number]]
            is_earliest = number == max(0, at - AHEAD) or giver in after[own[number - 1]]
            assert number <= at
            assert is_earliest, f"{action} could be received earlier"


def test_by_hand() -> None:
    clocks = Clocks(one_forward_one_backward(2, 4))
    first, second = receives(clocks)
    # F0 F1 B0 F2 B1 F3 B2 B3: the first gradient awaits F0, the second F1.
    assert first[1] == [Action("B", 0, 0)]
    assert first[2] == [Action("B", 0, 1)]
    # F0 B0 F1 B1 F2 ...: two inputs are there before any gradient, the third after B0.
    assert second[0] == [Action("F", 1, 0), Action("F", 1, 1)]
    assert second[2] == [Action("F", 1, 2)]


@pytest.mark.parametrize("shape", ["line", "v", "ring", "heads", "heads of a v"])
def test_lists_made_in_any_order_end_on_one_queue(shape: str) -> None:
    """Messages of two channels may leave in another order than their takers' there."""
    rng = Random(shape)
    helped = 0
    for _ in range(150):
        positions, num_microbatches = rng.choice((2, 3, 4)), rng.choice((2, 3, 6))
        places = SHAPES[shape](positions)
        heads = positions if shape.startswith("heads") else 0
        actions = drawn(places, num_microbatches, rng, heads=heads)
        clocks = Clocks(actions, heads=heads)
        assert Job(clocks, receives(clocks), lambda _: 0).ends(), actions
        simple = [always_early(clocks, p, ahead=0) for p in range(positions)]
        helped += not Job(clocks, simple, lambda _: 0).ends()
    assert helped > 10


SHAPES = {
    "line": lambda p: [(n,) for n in range(p)],
    "v": lambda p: [(n, 2 * p - 1 - n) for n in range(p)],
    "ring": lambda p: [(n, p + n) for n in range(p)],
    "heads": lambda p: [(n, p + n) for n in range(p)],
    "heads of a v": lambda p: [(n, 2 * p - 1 - n, 2 * p + n) for n in range(p)],
}


def drawn(
    places: Sequence[tuple[int, ...]], num_microbatches: int, rng: Random, *, heads: int
) -> Schedule:
    """Lists of a play in which, time and again, one of all actions that can be done is done."""
    num_stages = sum(map(len, places))
    split = rng.random() < 0.5
    lists: list[list[Action]] = [[] for _ in places]
    counts: Counter[tuple[str, int]] = Counter()
    done: set[Action] = set()
    while can := [
        (position, action)
        for position, held in enumerate(places)
        for stage, kind in product(held, "FIW" if split else "FB")
        if (action := Action(kind, stage, counts[kind, stage])).microbatch < num_microbatches
        and done.issuperset(awaited(action, num_stages, split=split, heads=heads))
    ]:
        position, action = rng.choice(can)
        lists[position].append(action)
        counts[action.kind, action.stage] += 1
        done.add(action)
    return lists
