"""Learning rates as pure functions of the step."""

from __future__ import annotations

from math import cos, pi

from weft.config.sections import CosineSchedule, OptimConfig, WsdSchedule


def lr_at(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of step ``step`` (from 0) of ``num_steps``."""
    return optim.lr * _factor(optim.schedule, step, num_steps)


def _factor(schedule: WsdSchedule | CosineSchedule, step: int, num_steps: int) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if isinstance(schedule, CosineSchedule):
        left = num_steps - schedule.warmup
        done = min(1.0, (step - schedule.warmup) / left) if left > 0 else 1.0
        shape = 0.5 * (1 + cos(pi * done))
    else:
        start = num_steps - schedule.decay
        shape = 1.0 if step < start else max(0.0, (num_steps - step) / max(1, schedule.decay))
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape
