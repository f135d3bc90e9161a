"""Parts of the head in modelled time, against the definition; and what they are for."""

from collections.abc import Sequence
from random import Random

from parity.cases import Case

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action
from weft.schedules.registry import schedule_of
from weft.simulate.play import simulate_plan


def defined(
    pipeline: PipelinePlan, stages: Sequence[StageTimes], borders: Sequence[BorderTimes]
) -> dict[Action, float]:
    """When each action has ended: after the one before it, and what it awaits has come over wires
    of one message at a time."""
    place = {n: p for p, held in enumerate(pipeline.positions()) for n in held}
    left = [list(actions) for actions in schedule_of(pipeline)]
    ended: dict[Action, float] = {}
    free = [0.0] * len(left)
    wires: dict[tuple[int, int], float] = {}
    came: dict[tuple[Action, int], float] = {}
    while any(left):
        for p, actions in enumerate(left):
            while actions and all((key in came) for key in _needs(pipeline, actions[0])):
                action = actions.pop(0)
                arrived = [came[key] for key in _needs(pipeline, action)]
                free[p] = ended[action] = max([free[p], *arrived]) + stages[action.stage].of(
                    action.kind
                )
                for n, (giver, taker) in enumerate(pipeline.borders):
                    stats = giver in pipeline.heads
                    way = int(action.kind == "B")
                    to = (taker, giver)[way]
                    if action.stage != (giver, taker)[way] or (stats and way):
                        continue
                    at = ended[action]
                    if place[giver] != place[taker]:
                        wires[n, way] = max(wires.get((n, way), 0.0), at) + borders[n].transfer_s
                        at = wires[n, way] + borders[n].latency_s
                    came[action, to] = at
    return ended


def _needs(pipeline: PipelinePlan, action: Action) -> list[tuple[Action, int]]:
    """What comes over borders before an action, and to which stage."""
    kind, stage, m = action
    found = []
    for giver, taker in pipeline.borders:
        stats = giver in pipeline.heads
        if taker == stage and kind == ("B" if stats else "F"):
            found.append((Action("F", giver, m), stage))
        if giver == stage and kind == "B" and not stats:
            found.append((Action("B", taker, m), stage))
    return found


def test_times_are_those_of_the_definition() -> None:
    rng = Random(2)
    for number in range(12):
        rows = [(40, 57), (97, 0), (30, 30, 37), (0, 97, 0), (50, 0, 47)][number % 5]
        ones = (1,) * len(rows)
        deep = (5, 4, 3)[-len(rows) :] if number % 2 else ()
        case = Case("", (7,), 1, dp=(ones,), layers=((2, 2, 0)[: len(rows)],), heads=(rows,),
                    in_flight=deep)  # fmt: skip
        (pipeline,) = case.plan().pipelines
        stages = [
            StageTimes(forward_s=rng.random(), input_grad_s=rng.random(), weight_grad_s=0.1)
            for _ in pipeline.stages
        ]
        borders = [
            BorderTimes(transfer_s=rng.random() / 2, latency_s=rng.random() / 4)
            for _ in pipeline.borders
        ]
        played = simulate_plan(pipeline, stages, borders)
        expected = defined(pipeline, stages, borders)
        found = {span.action: span.end_s for row in played.spans for span in row}
        assert found.keys() == expected.keys()
        assert all(abs(found[action] - end) < 1e-9 for action, end in expected.items())
