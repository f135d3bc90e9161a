"""The next step's samples reach a chip on a stream of their own, and its step waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from chipb.chip import NAME, with_chips

from weft.comm.address import RankAddress
from weft.data.batch import Batch
from weft.data.synthetic import SyntheticDataset
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.nn.stage import MicroBatch
from weft.train.inputs import Inputs
from weft.train.loop import cut

STEPS = 3


def steps(address: RankAddress, waits: bool) -> list[int]:
    """Every step's samples are the loader's. How many it had given when each step had begun."""
    device, given = torch.device(NAME, 0), 0
    data = SyntheticDataset(vocab_size=50, seq_len=8, seed=1)

    def loader() -> Iterator[Batch]:
        nonlocal given
        for step in range(STEPS):
            given += 1
            yield data.batch(range(4 * step, 4 * step + 4))
        raise RuntimeError("the disk is gone")

    def on_chip(batch: Batch, step: int) -> list[MicroBatch]:
        return cut(batch, [2, 2], device, dropout_seed=(1, step))

    inputs = Inputs(loader(), on_chip, device, last_step=STEPS + 1)
    hasty = mock.patch("torch.accelerator.current_stream", return_value=inputs._side)
    seen, pairs = [], []
    for step in range(STEPS):
        with nullcontext() if waits else hasty:
            batch, microbatches = inputs.take(step)
        expected = cut(batch, [2, 2], torch.device("cpu"), dropout_seed=(1, step))
        for found, known in zip(microbatches, expected, strict=True):
            one = found.context.dropout_keys, found.context.documents
            two = known.context.dropout_keys, known.context.documents
            assert one[1] is not None and two[1] is not None
            found_now = [*found.tensors.values(), one[0], one[1].packed.first]
            of_host = [*known.tensors.values(), two[0], two[1].packed.first]
            pairs += [(tensor + 0, value) for tensor, value in zip(found_now, of_host, strict=True)]
        del microbatches, found, one, found_now  # their memory may be used for the next step
        inputs.prepare(step + 1)
        seen.append(given)
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in pairs)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        inputs.take(STEPS)
    return seen


def test_the_next_step_is_copied_while_one_runs(chips: WorkerPool) -> None:
    assert chips.run(with_chips, steps, True, world_size=1)[0] == [2, 3, 3]


def test_a_step_that_does_not_wait_for_its_samples(chips: WorkerPool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        chips.run(with_chips, steps, False, world_size=1)
    assert "no event makes it wait" in str(caught.value)
