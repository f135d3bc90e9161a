"""A run goes on from memory, or without an agent where none can be had, with the same numbers."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_life import SMALL, STEPS, job, live, losses

from weft.checkpoint.agent import client, memory
from weft.checkpoint.agent.client import AgentClient
from weft.checkpoint.agent.image import Image
from weft.checkpoint.store import is_free
from weft.comm.address import RankAddress
from weft.comm.rendezvous import Rendezvous
from weft.elastic.pool import WorkerPool
from weft.report.progress import Progress
from weft.train import saver
from weft.train.engine import Engine
from weft.train.job import Job
from weft.train.stop import StopSignal
from weft.train.worker import RankLife

LIMIT_S = 300.0
TWO = [*SMALL, "plan.shares=[2,2]", "train.eval_every=0", "checkpoint.minutes=0"]
IN_MEMORY = [*TWO, "checkpoint.snapshot_every=1"]
WRITTEN = [*TWO, "checkpoint.every=1"]
LOST_AT = 3
GONE_ON = LOST_AT - 1


def loses_a_rank(
    address: RankAddress,
    first: Job,
    then: Job,
    *,
    torn: bool = False,
    machines: bool = False,
    lost: bool = False,
) -> list[str]:
    """The last rank fails in a step; the next epoch begins in the same processes. What was said.

    ``torn``: somebody wrote into memory meanwhile. ``machines``: each rank is on one of its own.
    ``lost``: that of the last rank goes down. What was written by then is copied, for others.
    """
    said: list[str] = []
    step, done = Engine.step, []
    address = replace(address, node=str(address.rank) if machines else "")

    def fails(engine: Engine, *given: Any, **settings: Any) -> Any:
        done.append(0)
        if lost and len(done) == LOST_AT:
            until(lambda: both_are_here(first, address.host))
        if address.rank == 1 and len(done) == LOST_AT:
            raise RuntimeError("this rank is lost")
        return step(engine, *given, **settings)

    with Rendezvous(address, 60.0) as rendezvous, pytest.MonkeyPatch.context() as patch:
        life = RankLife(rendezvous, StopSignal())
        patch.setattr(Progress, "warn", lambda _, text: said.append(text))
        patch.setattr(Engine, "step", fails)
        if lost:  # else a copy is left out where the one before takes longer than a step
            patch.setattr(AgentClient, "is_on_its_way", property(arrived))
        with pytest.raises(Exception, match=r"lost|failed|epoch"):
            life.epoch(first)
        root = first.checkpoints
        assert is_free(root, LIMIT_S)
        if address.rank == 0:
            shutil.copytree(root, first.out.with_name("copied") / "checkpoints")
        if lost and address.rank == 1:
            assert life.lease.process is not None
            life.lease.process.kill()
            life.lease.process.wait()
        if torn and address.rank == 1:
            patch.setattr(memory, "opened_image", changed)
        patch.setattr(Engine, "step", step)
        patch.setattr(AgentClient, "is_on_its_way", on_its_way)
        assert life.epoch(then) == STEPS
        assert life.lease.process is None, "an agent that nobody needs any more"
    return said


on_its_way = AgentClient.is_on_its_way


def arrived(agent: AgentClient) -> bool:
    """Waits until the newest copy is on the other machine."""
    until(lambda: not on_its_way.__get__(agent))
    return False


def both_are_here(one: Job, host: str) -> bool:
    """Of the last step, in the memory of this machine."""
    with memory.MemoryOfMachine(one.checkpoints, host) as here:
        return (GONE_ON, [0, 1]) in [(offer.step, offer.ranks) for offer in here.offers]


def changed(handle: int, pieces_bytes: int) -> Image:
    image = client_opened(handle, pieces_bytes)
    for piece in image.pieces:  # as if another copy lay there
        image.data(piece)[:] = b"\xff" * piece.nbytes
    return image


client_opened = memory.opened_image


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    out = tmp_path_factory.mktemp("whole")
    pool.run(live, [job(TWO, out, STEPS)], world_size=2)
    return losses(out)


def test_the_next_epoch_goes_on_from_memory(
    tmp_path: Path, pool: WorkerPool, whole: list[float]
) -> None:
    """Nothing was written to the disk; not one bit differs."""
    one = job(IN_MEMORY, tmp_path / "one", STEPS)
    said, _ = pool.run(loses_a_rank, one, one, world_size=2)
    note = f"note: the state after step {GONE_ON} was in memory; there is no checkpoint on disk"
    assert note in said
    assert losses(one.out) == whole
    assert not list((tmp_path / "copied/checkpoints").iterdir())


def test_memory_that_was_changed_is_left_for_the_disk(
    tmp_path: Path, pool: WorkerPool, whole: list[float]
) -> None:
    one = job(WRITTEN, tmp_path / "one", STEPS)
    said, _ = pool.run(torn, one, world_size=2)
    place = f"memory/step-{GONE_ON:08d}/rank-00000.safetensors"
    assert f"note: {place}: is not what was copied (guard differs): going on from the disk" in said
    assert losses(one.out) == whole


def torn(address: RankAddress, one: Job) -> list[str]:
    return loses_a_rank(address, one, one, torn=True)


def on_two_machines(address: RankAddress, first: Job, then: Job) -> list[str]:
    return loses_a_rank(address, first, then, machines=True)


def loses_a_machine(address: RankAddress, one: Job) -> list[str]:
    return loses_a_rank(address, one, one, machines=True, lost=True)


@pytest.mark.parametrize("job_of", [loses_a_rank, on_two_machines], ids=["one", "two"])
def test_another_plan_reads_memory_as_the_disk(
    job_of: Callable[..., list[str]], tmp_path: Path, pool: WorkerPool
) -> None:
    """From two pipelines to two stages; where each rank has a machine, from one to the other."""
    stages = "plan.stages=[{layers: 1}, {}]"
    other = [*(each for each in WRITTEN if not each.startswith("plan.")), stages]
    first, then = job(WRITTEN, tmp_path / "one", STEPS), job(other, tmp_path / "one", STEPS)
    said, _ = pool.run(job_of, first, then, world_size=2)
    disk = f"the newest checkpoint on disk is of step {GONE_ON}"
    assert f"note: the state after step {GONE_ON} was in memory; {disk}" in said
    pool.run(live, [replace(then, out=tmp_path / "copied")], world_size=2)
    assert losses(then.out)[GONE_ON:] == losses(tmp_path / "copied")
    assert len(losses(then.out)) == STEPS


def test_a_lost_machine_goes_on_from_the_memory_of_another(
    tmp_path: Path, pool: WorkerPool, whole: list[float]
) -> None:
    one = job([*IN_MEMORY, "checkpoint.peers=1"], tmp_path / "one", STEPS)
    said, _ = pool.run(loses_a_machine, one, world_size=2)
    note = f"note: the state after step {GONE_ON} was in memory; there is no checkpoint on disk"
    assert note in said
    assert losses(one.out) == whole


def without_an_agent(address: RankAddress, one: Job, fault: str) -> list[str]:
    """What is said where no agent can be had."""
    said: list[str] = []

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with Rendezvous(address, 60.0) as rendezvous, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "warn", lambda _, text: said.append(text))
        match fault:
            case "no memory":
                patch.setattr(saver, "free_memory_bytes", lambda: 1)
            case "no copy" if address.rank == 1:
                patch.setattr(AgentClient, "copy", full)
            case "ends at once":
                patch.setattr(client, "AGENT", "weft.nothing_of_that_name")
                patch.setattr(AgentClient, "hand_over", in_vain)
        assert RankLife(rendezvous, StopSignal()).epoch(one) == STEPS
    return said


handed_over = AgentClient.hand_over


def in_vain(agent: AgentClient, *given: Any, **settings: Any) -> None:
    """To an agent that has ended before the next save."""
    handed_over(agent, *given, **settings)
    until(lambda: not agent.is_alive)


FALLBACKS = {
    "no memory": "copies of their state need 0.0 GiB of host memory, more than 50% of what is free",
    "no copy": "rank 1: no memory for a copy: [Errno 28] No space left on device",
    "ends at once": "the process that should ended at once; see {logs}/agent*.log",
}


@pytest.mark.parametrize("fault", FALLBACKS)
def test_ranks_write_themselves_where_no_agent_can_be_had(
    fault: str, tmp_path: Path, pool: WorkerPool, whole: list[float]
) -> None:
    """It is said once, and no checkpoint is lost after that."""
    one = job([*WRITTEN, "checkpoint.keep=9"], tmp_path / "one", STEPS)
    said, _ = pool.run(without_an_agent, one, fault, world_size=2)
    why = FALLBACKS[fault].format(logs=one.out / "logs")
    # What ends at once may be found gone, or not be reached: both are true, and one is said.
    gone = (
        ("it cannot be reached: [Errno 111] Connection refused",) if fault == "ends at once" else ()
    )
    told = [f"checkpoints are written by the ranks themselves: {each}" for each in (why, *gone)]
    assert sum(said.count(each) for each in told) == 1
    saved = {path.name for path in one.checkpoints.glob("step-*")}
    late = {"step-00000001"} if fault == "ends at once" else set()
    assert saved | late == {f"step-{step:08d}" for step in range(1, STEPS + 1)}
    assert losses(one.out) == whole
