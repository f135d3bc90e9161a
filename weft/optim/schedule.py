"""Learning rates as pure functions of the step."""

from __future__ import annotations

from math import cos, pi

from weft.config.optim_sections import CosineSchedule, OptimConfig, WsdSchedule


def lr_at(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of step ``step`` (from 0) of ``num_steps``."""
    return optim.lr * _factor(optim.schedule, step, num_steps)


def _factor(schedule: WsdSchedule | CosineSchedule, step: int, num_steps: int) -> float:
    warmup = round(schedule.warmup * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(schedule, CosineSchedule):
        shape = 0.5 * (1 + cos(pi * (step - warmup) / (num_steps - warmup)))
    else:
        decay = round(schedule.decay * num_steps)
        shape = min(1.0, (num_steps - step) / decay) if decay else 1.0
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape
