"""After an error in a step of several processes nobody pairs the next step with what is left."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.api.weave import woven
from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool

BATCH = torch.ones(4, 3)


class Sized(nn.Linear):
    """A model for which some batches are too large."""

    is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x).square()
    return result


def skips(address: RankAddress, full: tuple[int, ...], way: str) -> str:
    """What is said to a process that leaves out the batch for which it has too little memory."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    model = Sized(3, 2)
    engine = woven(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, loss=squares)
    call = {"step": engine.step, "eval_batch": engine.eval_batch}[way]
    said = ""
    try:
        engine.step(BATCH)
        model.is_full = comm.rank in full
        with suppress(torch.OutOfMemoryError):
            call(BATCH)
        model.is_full = False
        engine.step(BATCH)
    except (CommError, ConfigError) as error:
        said = str(error)
    comm.close(abort=True)
    return said


@pytest.mark.parametrize("way", ["step", "eval_batch"])
@pytest.mark.parametrize("full", [(0, 1), (1,)], ids=["all", "one"])
def test_the_next_step_is_refused(full: tuple[int, ...], way: str, pool: WorkerPool) -> None:
    said = pool.run(skips, full, way, world_size=2)
    for rank in full:
        assert said[rank].startswith(f"engine.{way} = 'ended in an error': expected calls that end")
        assert "go on from what was saved" in said[rank]
    assert all(said), "the others hear that somebody left"


def test_one_process_may_leave_out_a_batch() -> None:
    model = Sized(3, 2)
    engine = weft.weave(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=squares)
    engine.step(BATCH)
    start = model.weight.detach().clone()
    model.is_full = True
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(BATCH)
    assert torch.equal(model.weight, start)
    model.is_full = False
    engine.step(BATCH)
    assert not torch.equal(model.weight, start)
