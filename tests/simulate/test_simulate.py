"""Played time against closed formulas, a hand count and a clock that ticks one unit at a time."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedules.test_schedules import NAMES, pipeline

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import ScheduleName
from weft.schedules.action import Action, Schedule
from weft.schedules.registry import schedule_of
from weft.simulate.picture import draw
from weft.simulate.play import simulate_plan

FREE = BorderTimes()
EVEN = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)


class Clock:
    """Ticks one unit at a time; all times are whole numbers. Written without the package's own
    rules of what needs what.
    """

    def __init__(
        self, schedule: Schedule, stages: Sequence[StageTimes], borders: Sequence[BorderTimes]
    ) -> None:
        self.stages, self.borders = stages, borders
        self.position_of = {a.stage: p for p, actions in enumerate(schedule) for a in actions}
        self.waiting = [deque(actions) for actions in schedule]
        self.busy: dict[int, tuple[Action, int, int]] = {}
        self.times: dict[Action, tuple[int, int]] = {}
        self.wire_free: dict[tuple[int, int], int] = {}
        self.there: dict[Action, int] = {}

    def run(self) -> dict[Action, tuple[int, int]]:
        """Start and end of every action."""
        now = 0
        while any(self.waiting) or self.busy:
            assert now < 100_000, "the clock never stops"
            self.end(now)
            self.begin(now)
            now += 1
        return self.times

    def end(self, now: int) -> None:
        for p, (action, start, end) in list(self.busy.items()):
            if end == now:
                self.times[action] = (start, end)
                del self.busy[p]
                self.hand_on(action, now)

    def begin(self, now: int) -> None:
        for p, queue in enumerate(self.waiting):
            if p not in self.busy and queue and self.may_begin(queue[0], now):
                action = queue.popleft()
                seconds = self.stages[action.stage].of(action.kind)
                self.busy[p] = (action, now, now + int(seconds))

    def may_begin(self, action: Action, now: int) -> bool:
        kind, stage, microbatch = action
        if kind == "W":
            return Action("I", stage, microbatch) in self.times
        if kind == "F":
            before = Action("F", stage - 1, microbatch)
            return stage == 0 or self.there.get(before, now + 1) <= now
        after = Action(kind, stage + 1, microbatch)
        own = Action("F", stage, microbatch) in self.times
        return own and (after.stage == len(self.stages) or self.there.get(after, now + 1) <= now)

    def hand_on(self, action: Action, now: int) -> None:
        target = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or target not in self.position_of:
            return
        self.there[action] = now
        if self.position_of[target] != self.position_of[action.stage]:
            border, wire = self.borders[min(target, action.stage)], (action.stage, target)
            if border.is_shared:  # one way out of the position, for what goes on and what goes back
                wire = (self.position_of[action.stage], -1)
            self.wire_free[wire] = max(now, self.wire_free.get(wire, 0)) + int(border.transfer_s)
            self.there[action] = self.wire_free[wire] + int(border.latency_s)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_matches_a_ticking_clock(name: ScheduleName, seed: int) -> None:
    """Unlike stages, slow borders and wires that queue."""
    rng = random.Random(seed)
    plan = pipeline(name, rng.randint(1, 5), rng.randint(1, 9))
    stages = [
        StageTimes(
            forward_s=rng.randint(1, 9),
            input_grad_s=rng.randint(1, 9),
            weight_grad_s=rng.randint(1, 9),
        )
        for _ in plan.stages
    ]
    borders = [
        BorderTimes(
            transfer_s=rng.randint(0, 12),
            latency_s=rng.randint(0, 5),
            is_shared=rng.random() < 0.5,
        )
        for _ in plan.stages[1:]
    ]
    schedule = schedule_of(plan)
    expected = Clock(schedule, stages, borders).run()
    timeline = simulate_plan(plan, stages, borders)
    found = {span.action: (span.start_s, span.end_s) for row in timeline.spans for span in row}
    assert found == expected
    assert [[span.action for span in row] for row in timeline.spans] == schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("positions", "microbatches"), [(1, 3), (2, 5), (4, 8), (8, 3), (5, 1)])
def test_bubble_of_the_papers(name: ScheduleName, positions: int, microbatches: int) -> None:
    """(P - 1) / (m + P - 1), whatever forward and backward take."""
    times = StageTimes(forward_s=0.7, input_grad_s=1.1, weight_grad_s=0.4)
    plan = pipeline(name, positions, microbatches)
    timeline = simulate_plan(plan, [times] * positions, [FREE] * (positions - 1))
    assert timeline.bubble == pytest.approx((positions - 1) / (microbatches + positions - 1))
    assert timeline.busy_s == pytest.approx([2.2 * microbatches] * positions)


def test_one_microbatch_pays_for_every_border() -> None:
    """Three stages by hand: 2 + 3 + 5 forward, 4 + 6 + 10 back, four crossings of 1.5."""
    stages = [StageTimes(forward_s=t, input_grad_s=t, weight_grad_s=t) for t in (2.0, 3.0, 5.0)]
    borders = [BorderTimes(transfer_s=1.0, latency_s=0.5)] * 2
    timeline = simulate_plan(pipeline("1f1b", 3, 1), stages, borders)
    assert timeline.step_s == 10 + 20 + 6


@pytest.mark.parametrize(
    ("way_s", "in_flight", "usual_s", "step_s"),
    [(0.75, (3, 1), 123.0, 100.5), (1.5, (3, 1), 147.0, 102.0), (3.0, (4, 1), 195.0, 105.0)],
)
def test_more_in_flight_hide_a_slow_border(
    way_s: float, in_flight: tuple[int, ...], usual_s: float, step_s: float
) -> None:
    """Two stages of three seconds a microbatch, 32 of them: by the usual list each waits for the
    way there and back; by the other, the first and the last alone do."""
    plan, stages = pipeline("1f1b", 2, 32), [EVEN, EVEN]
    border = [BorderTimes(latency_s=way_s)]
    assert simulate_plan(plan, stages, border).step_s == usual_s
    deeper = replace(plan, in_flight=in_flight)
    assert simulate_plan(deeper, stages, border).step_s == step_s == 32 * 3 + 3 + 2 * way_s


def test_a_smaller_last_microbatch_takes_less() -> None:
    plan = replace(pipeline("gpipe", 1, 1), samples=7, microbatch=4)
    assert simulate_plan(plan, [EVEN], []).step_s == 3 * (1 + 0.75)


def test_text_picture() -> None:
    """Two positions, two microbatches, a moment a second; 18 seconds of which 6 idle."""
    timeline = simulate_plan(pipeline("1f1b", 2, 2), [EVEN] * 2, [FREE])
    assert draw(timeline, width=9).splitlines() == [
        "  0 FF..BB.BB",
        "  1 .FBBFBB..",
        "    9 s, 33.3% idle",
    ]
