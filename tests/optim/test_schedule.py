"""Learning rates by hand."""

import pytest

from weft.config.optim_sections import AdamWConfig, CosineSchedule, WsdSchedule
from weft.optim.schedule import lr_at


def rates(schedule: WsdSchedule | CosineSchedule, num_steps: int) -> list[float]:
    optim = AdamWConfig(lr=2.0, schedule=schedule)
    return [lr_at(optim, step, num_steps) for step in range(num_steps)]


def test_warm_up_stay_and_decay() -> None:
    schedule = WsdSchedule(warmup=0.2, decay=0.4, final_ratio=0.0)
    expected = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates(schedule, 10) == pytest.approx(expected)


def test_the_floor_is_reached_one_step_after_the_end() -> None:
    schedule = WsdSchedule(warmup=0.0, decay=1.0, final_ratio=0.5)
    assert rates(schedule, 4) == pytest.approx([2.0, 1.75, 1.5, 1.25])


def test_no_decay_stays() -> None:
    assert rates(WsdSchedule(warmup=0.0, decay=0.0), 3) == [2.0, 2.0, 2.0]


def test_half_a_cosine() -> None:
    schedule = CosineSchedule(warmup=0.2, final_ratio=0.0)
    found = rates(schedule, 5)
    # After a warm-up of one step: 1 + cos(pi * k / 4) for k = 0, 1, 2, 3.
    assert found == pytest.approx([2.0, 2.0, 1.7071067811865475, 1.0, 0.2928932188134524])
