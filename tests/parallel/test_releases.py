"""When sent tensors may be let go, against reachability in the graph of all actions."""

from itertools import pairwise

import pytest

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, ScheduleName, StagePlan
from weft.schedules.action import Action, Schedule, awaited
from weft.schedules.clocks import Clocks
from weft.schedules.one_forward_one_backward import one_forward_one_backward
from weft.schedules.registry import schedule_of
from weft.schedules.releases import releases

NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def schedule(name: ScheduleName, positions: int, num_microbatches: int) -> Schedule:
    meshes = [Mesh.of((p,), dp=1) for p in range(positions)]
    if name == "interleaved":
        meshes *= 2
    elif name in ("zb-v", "dualpipe-v"):
        meshes += meshes[::-1]
    stages = tuple(StagePlan(mesh=mesh, layers=(0, 0)) for mesh in meshes)
    return schedule_of(
        PipelinePlan(stages=stages, samples=num_microbatches, microbatch=1, schedule=name)
    )


CASES = [(name, p, m) for name in NAMES for p, m in ((2, 5), (3, 3), (4, 9))]


@pytest.mark.parametrize(("name", "positions", "num_microbatches"), CASES)
def test_the_earliest_action_that_depends_on_the_taker(
    name: ScheduleName, positions: int, num_microbatches: int
) -> None:
    lists = schedule(name, positions, num_microbatches)
    after = reachable(lists)
    where = {action: p for p, actions in enumerate(lists) for action in actions}
    clocks = Clocks(lists)
    for position, actions in enumerate(lists):
        found = releases(clocks, position)
        for action in actions:
            step = {"F": 1, "B": -1, "I": -1}.get(action.kind)
            taker = step and Action(action.kind, action.stage + step, action.microbatch)
            expected = None
            if taker in where and where[taker] != position:
                expected = next((i for i, a in enumerate(actions) if a in after[taker]), None)
            at = [i for i, released in enumerate(found) if action in released]
            assert at == ([] if expected is None else [expected]), str(action)


def reachable(lists: Schedule) -> dict[Action, set[Action]]:
    """For every action all those that cannot end before it: depth first, from the definition."""
    split = any(action.kind in "IW" for actions in lists for action in actions)
    num_stages = 1 + max(action.stage for actions in lists for action in actions)
    following: dict[Action, list[Action]] = {a: [] for actions in lists for a in actions}
    for actions in lists:
        for first, second in pairwise(actions):
            following[first].append(second)
        for action in actions:
            for key in awaited(action, num_stages, split=split):
                following[Action(*key)].append(action)
    result = {}
    for start in following:
        seen, stack = set(), [start]
        while stack:
            new = [a for a in following[stack.pop()] if a not in seen]
            seen.update(new)
            stack += new
        result[start] = seen
    return result


def test_by_hand() -> None:
    clocks = Clocks(one_forward_one_backward(2, 4))
    first, second = (releases(clocks, p) for p in range(2))
    # F0 F1 B0 F2 B1 F3 B2 B3: an output has arrived when its gradient has come back.
    assert first[2] == [Action("F", 0, 0)]
    # F0 B0 F1 B1 F2 ...: the third input was made after the first gradient had come.
    assert second[4] == [Action("B", 1, 0)]
    # Of four gradients the last two are held to the end of the step, however many there are.
    assert sum(map(len, second)) == 2


@pytest.mark.parametrize(("name", "positions", "num_microbatches"), CASES)
def test_both_ends_of_a_border_keep_the_same_order(
    name: ScheduleName, positions: int, num_microbatches: int
) -> None:
    """What libraries that pair messages by order alone need of a schedule."""
    orders: dict[tuple[str, int], list[int]] = {}
    for actions in schedule(name, positions, num_microbatches):
        for kind, stage, microbatch in actions:
            orders.setdefault((kind, stage), []).append(microbatch)
    for (kind, stage), order in orders.items():
        beyond = orders.get((kind, stage + 1 if kind == "F" else stage - 1), order)
        assert kind == "W" or order == beyond
