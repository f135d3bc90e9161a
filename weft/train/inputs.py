"""The batches of steps, on the device before their step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.data.batch import Batch
from weft.nn.stage import MicroBatch


class Inputs:
    """One batch after another, cut; the next is copied on a stream of its own while a step runs.

    Args:
        batches: This rank's samples of one step after the other.
        cut: Makes micro-batches on the device of a step's samples, on the current stream.
        last_step: No step begins after it.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        cut: Callable[[Batch, int], Sequence[MicroBatch]],
        device: torch.device,
        *,
        last_step: int,
    ) -> None:
        self._batches, self._cut, self._last_step = batches, cut, last_step
        self._device = device
        self._side = None if device.type == HOST else torch.Stream(device=device)
        self._ahead: _Ahead | Exception | None = None

    def take(self, step: int) -> tuple[Batch, Sequence[MicroBatch]]:
        """What step ``step`` trains on; steps are asked for in their order.

        Raises:
            Exception: the loader's, of this step.
        """
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is None:
            batch = next(self._batches)
            return batch, self._cut(batch, step)
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(ahead.ready)
        for tensor in _tensors(ahead.microbatches):
            tensor.record_stream(stream)
        return ahead.batch, ahead.microbatches

    def forget(self) -> None:
        """What was prepared is another rank's now."""
        self._ahead = None

    def prepare(self, step: int) -> None:
        """Begin to copy what ``take`` will give for this step; where it is on the host, nothing.

        What the loader cannot give is said when the step is asked for: the one before it counts.
        """
        if self._side is None or step >= self._last_step:
            return
        try:
            batch = next(self._batches)
        except Exception as error:  # noqa: BLE001  (kept, and raised)
            self._ahead = error
            return
        with self._side:
            microbatches = self._cut(batch, step)
        self._ahead = _Ahead(batch, microbatches, self._side.record_event())


class _Ahead(NamedTuple):
    batch: Batch
    microbatches: Sequence[MicroBatch]
    ready: torch.Event


def _tensors(microbatches: Sequence[MicroBatch]) -> Iterator[Tensor]:
    for each in microbatches:
        yield from each.tensors.values()
        context = each.context
        packed = () if context.documents is None else context.documents.packed
        found = (context.positions, context.dropout_keys, *packed)
        yield from (each for each in found if isinstance(each, Tensor))
