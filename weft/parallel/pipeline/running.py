"""Buffers that forwards add to: the same after a step, however its samples were divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.axes.registry import AXES
from weft.config.axes import MODEL_AXES
from weft.nn.stage import Buffer, Stage
from weft.plan.layout import Dim
from weft.plan.plan import RankPlan


class RunningBuffers:
    """The buffers of a job that change, and this rank's copies of some.

    Args:
        declared: All of the job, the same on every rank.
        stages: Of this rank.
    """

    def __init__(
        self, declared: Sequence[Buffer], stages: Iterable[Stage], rank_plan: RankPlan
    ) -> None:
        self._declared = [buffer for buffer in declared if buffer.rule != "constant"]
        modules = [stage.module for stage in stages]
        every = {name: tensor for module in modules for name, tensor in module.named_buffers()}
        self._held = {b.name: every[b.name] for b in self._declared if b.name in every}
        self._adds = {b.name for b in self._declared if _adds(b, rank_plan)}
        params = {name: param for module in modules for name, param in module.named_parameters()}
        moves = [(b.name, b.moves[0]) for b in self._declared if b.moves is not None]
        self._moved = {name: params[moved] for name, moved in moves if moved in params}
        self._samples = rank_plan.plan.global_batch
        self._added = {b.name: _nothing(b, self._held.get(b.name)) for b in self._declared}

    @property
    def names(self) -> Sequence[str]:
        """Of all in the job that a step leaves with another value."""
        return [buffer.name for buffer in self._declared if buffer.rule != "count"]

    def begin(self) -> None:
        """Nothing was added in this step yet."""
        for added in self._added.values():
            added.zero_()

    @contextmanager
    def unchanged(self, *, counts: bool) -> Iterator[None]:
        """Take back what is added inside; ``counts``: it belongs to the step's sums."""
        before = {name: tensor.clone() for name, tensor in self._held.items()}
        yield
        with torch.no_grad():
            for name, tensor in self._held.items():
                if counts and name in self._adds:
                    self._added[name] += (tensor - before[name]).double().to(self._added[name])
                tensor.copy_(before[name])

    def sums(self, device: torch.device) -> list[Tensor]:
        """What this rank's forwards added, flat; zeros for what other ranks hold."""
        return [added.flatten().to(device) for added in self._added.values()]

    @torch.no_grad()
    def settle(self, totals: Tensor, factor: Tensor) -> None:
        """New values from the sums over all ranks. ``factor``: 0 where the step changes nothing."""
        sizes = [added.numel() for added in self._added.values()]
        for buffer, total in zip(self._declared, torch.split(totals, sizes), strict=True):
            held = self._held.get(buffer.name)
            if buffer.moves is not None and buffer.name in self._moved:
                missing = (total.sum() - total * len(total)).sign() * (factor != 0)
                moved = self._moved[buffer.name]
                moved.add_(missing.to(moved), alpha=buffer.moves[1])
            if held is None or buffer.rule == "count":
                continue
            whole = total.view(held.shape)
            if buffer.rule == "sum":
                held += whole.to(held.dtype)
            else:
                held.lerp_((whole / self._samples).to(held.dtype), buffer.momentum)

    def counts(self, totals: Sequence[float]) -> Mapping[str, list[int]]:
        """By name the numbers of a step that are only told, from the sums over all ranks."""
        found, start = {}, 0
        for buffer in self._declared:
            end = start + self._added[buffer.name].numel()
            if buffer.rule == "count":
                found[buffer.name] = [round(total) for total in totals[start:end]]
            start = end
        return found


def _nothing(buffer: Buffer, held: Tensor | None) -> Tensor:
    """Of what may be added; beside the value, so that nothing waits for the device."""
    zeros = buffer.value().double().zero_()
    return zeros if held is None else zeros.to(held.device)


def _adds(buffer: Buffer, rank_plan: RankPlan) -> bool:
    """No other rank adds what this one does."""
    position = rank_plan.stage_plan.mesh.coordinate(rank_plan.rank)
    over = Dim(name=buffer.over, size=0)
    return all(position[axis] == 0 or AXES[axis].divides(over, "inner") for axis in MODEL_AXES)
