"""What steps came to, read from the device: where that means waiting, for several steps at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.config.sections import Config
from weft.plan.plan import Plan
from weft.platform.registry import PLATFORMS
from weft.train.engine import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """One step that was done, in numbers of the host; the same on every rank but for the times."""

    step: int
    """Optimizer steps done, this one included."""
    lr: float
    loss: float
    grad_norm: float
    stop: float
    """How many ranks asked to stop after this step."""
    data: int
    """Fingerprint of the global batch."""
    seconds: float
    """From asking for the batch to the end of the update; of steps read together the mean."""
    ended: float
    """By ``time.perf_counter``."""


def waits_for_reads(plan: Plan) -> bool:
    """Some rank computes where its numbers do not lie in the host's memory. Known to all alike."""
    devices = {stage.device for _, _, stage in plan.stages()}
    return not all(name in PLATFORMS and PLATFORMS[name].is_host for name in devices)


class Reader:
    """Reads the numbers of a step when somebody looks at them: each at once where that is free,
    else with those of the steps before it, in one wait.

    Args:
        last_step: The run ends with it; its numbers, and the first step's, are always read.
        waits: Reading waits for a device.
    """

    def __init__(self, config: Config, first_step: int, last_step: int, *, waits: bool) -> None:
        self._edges = (first_step + 1, last_step)
        every = (config.train.log_every, config.train.eval_every, config.checkpoint.every)
        self._every = [steps for steps in every if steps] if waits else [1]
        self._results: list[Tensor] = []
        self._steps: list[tuple[int, float]] = []
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        if not self._steps:
            self._began = time.perf_counter()

    def add(self, step: int, lr: float, result: StepResult) -> list[StepNumbers]:
        """Numbers of this step and of all since the last that were read, or none for now."""
        row = (result.loss, result.grad_norm, result.stop, result.data)
        self._results.append(torch.stack(row))
        self._steps.append((step, lr))
        if step not in self._edges and all(step % steps for steps in self._every):
            return []
        rows = torch.stack(self._results).tolist()  # waits for the device: the time is the steps'
        now = time.perf_counter()
        seconds = (now - self._began) / len(rows)
        found = []
        for (done, rate), (loss, grad_norm, stop, data) in zip(self._steps, rows, strict=True):
            found.append(
                StepNumbers(
                    step=done,
                    lr=rate,
                    loss=loss,
                    grad_norm=grad_norm,
                    stop=stop,
                    data=int(data),
                    seconds=seconds,
                    ended=now - (step - done) * seconds,
                )
            )
        self._results.clear()
        self._steps.clear()
        return found
