"""Seconds of a stage and of the border between two, as a play of a schedule needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.schedules.action import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage for one full microbatch. Stages may be as unlike as their chips."""

    forward_s: float
    input_grad_s: float
    """Backward, first half; with recomputation, the second forward too."""
    weight_grad_s: float
    """Backward, second half."""
    update_s: float = 0.0
    """Once a step: reducing gradients, updating, publishing parameters, as far as nothing hides
    it."""
    last: StageTimes | None = None
    """For the last microbatch, where that is smaller: of the rank that then has most. None: in
    proportion to its samples."""

    def of_sizes(self, kind: Kind, size: float) -> tuple[float, float]:
        """Seconds of one action for a full microbatch, and for the last, which is such a part of
        one."""
        full = self.of(kind)
        return full, full * size if self.last is None else self.last.of(kind)

    def scaled(self, factor: float, update_s: float = 0.0) -> StageTimes:
        """The times of a part of the stage, or on another chip; of microbatches alone."""
        return StageTimes(
            forward_s=self.forward_s * factor,
            input_grad_s=self.input_grad_s * factor,
            weight_grad_s=self.weight_grad_s * factor,
            update_s=update_s,
            last=self.last and self.last.scaled(factor, update_s),
        )

    def without(self, other: StageTimes, times: float = 1.0) -> StageTimes:
        """Of a full microbatch alone, less so many times what another stage takes."""
        return StageTimes(
            forward_s=self.forward_s - times * other.forward_s,
            input_grad_s=self.input_grad_s - times * other.input_grad_s,
            weight_grad_s=self.weight_grad_s - times * other.weight_grad_s,
        )

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    def of(self, kind: Kind) -> float:
        """Seconds of one action."""
        match kind:
            case "F":
                return self.forward_s
            case "B":
                return self.input_grad_s + self.weight_grad_s
            case "I":
                return self.input_grad_s
            case "W":
                return self.weight_grad_s


def longest(every: Sequence[StageTimes]) -> StageTimes:
    """Of ranks that wait for one another: of each part the longest."""
    if len(every) == 1:
        return every[0]
    return StageTimes(
        forward_s=max(each.forward_s for each in every),
        input_grad_s=max(each.input_grad_s for each in every),
        weight_grad_s=max(each.weight_grad_s for each in every),
        update_s=max(each.update_s for each in every),
        last=longest([each.last or each for each in every]) if every[0].last else None,
    )


def shortest(every: Sequence[StageTimes]) -> StageTimes:
    """Of a full microbatch: of each part the shortest."""
    return StageTimes(
        forward_s=min(each.forward_s for each in every),
        input_grad_s=min(each.input_grad_s for each in every),
        weight_grad_s=min(each.weight_grad_s for each in every),
        update_s=min(each.update_s for each in every),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BorderTimes:
    """Seconds that the border between two stages takes for one full microbatch, either way.

    A wire carries one message after another. Nobody computes slower while it does.
    """

    transfer_s: float = 0.0
    """How long a message occupies the wire."""
    latency_s: float = 0.0
    """How much later it is there. Other messages may leave meanwhile."""
    is_shared: bool = False
    """What leaves a position over it does so by the one wire of all such borders, as over the port
    of a node; off: each way of each border has a wire of its own."""
    last: float | None = None
    """Part of the time that the last microbatch takes: what the rank that has most of it sends.
    None: in proportion to its samples."""

    def of_sizes(self, size: float) -> tuple[float, float]:
        """Seconds on the wire of a full microbatch, and of the last, which is such a part of
        one."""
        return self.transfer_s, self.transfer_s * (size if self.last is None else self.last)
