"""Copies of a chip's state for checkpoints: beside the next step, whose update waits for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from chipb.chip import NAME, with_chips
from chipb.test_chipb_jobs import on
from train.small_jobs import SMALL, STEPS, job, losses

from weft.checkpoint.agent.download import Downloads
from weft.comm.address import RankAddress
from weft.comm.rendezvous import Rendezvous
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.plan.plan import ZeroLevel
from weft.report.events import EVENTS_FILE, read_events
from weft.report.progress import Progress
from weft.train.engine import Engine
from weft.train.job import Job
from weft.train.saver import Saver
from weft.train.still_read import StillRead
from weft.train.stop import StopSignal
from weft.train.worker import RankLife

LOST_AT = 3
TWO = [
    *SMALL,
    "plan.shares=[2,2]",
    "train.eval_every=0",
    "checkpoint.minutes=0",
]
ONE = [*SMALL, "plan.shares=[4]", "train.eval_every=0", "checkpoint.minutes=0"]


def on_chips(overrides: list[str], out: Path, families: str) -> Job:
    """Where there are two pipelines, each updates its part of what both have, and gathers."""
    made = job(overrides, out, STEPS)
    plan = on(made.plan, families)
    zero: ZeroLevel = 1 if len(plan.pipelines) > 1 else 0
    pipelines = tuple(
        replace(each, stages=tuple(replace(stage, zero=zero) for stage in each.stages))
        for each in plan.pipelines
    )
    return replace(made, plan=replace(plan, pipelines=pipelines))


def copied(address: RankAddress) -> dict[str, Any]:
    """Three copies of 3,000 bytes by way of 1,024, twice."""
    device = torch.device(NAME, 0)
    downloads, host, ended = Downloads(device, most_bytes=1024), bytearray(3000), []
    made = []
    for time in range(2):
        numbers = torch.arange(250.0).add(time).to(device)
        other = torch.arange(500).add(time).to(torch.float32).to(device)
        tensors = [(numbers, 0), (other.view(20, 25).t(), 1000)]

        def write(data: memoryview, place: int) -> None:
            host[place : place + len(data)] = data

        download = downloads.begin(tensors, write, lambda: ended.append(0))
        torch.accelerator.current_stream(device).wait_event(download.has_read)
        numbers.zero_()
        other.zero_()
        download.arrives.result()
        found = torch.frombuffer(host, dtype=torch.float32)
        assert found[:250].tolist() == torch.arange(250.0).add(time).tolist()
        assert torch.equal(found[250:].view(25, 20), torch.arange(500.0).add(time).view(20, 25).t())
        made.append(downloads.made)

    def refuses(data: memoryview, place: int) -> None:
        raise OSError(28, "No space left on device")

    failed = downloads.begin([(numbers, 0), (other, 1000)], refuses, lambda: ended.append(1))
    problem = failed.arrives.exception()
    downloads.close()
    return {"made": made, "ended": ended, "problem": str(problem)}


def test_pinned_memory_is_bounded_and_used_again(chips: WorkerPool) -> None:
    found = chips.run(with_chips, copied, world_size=1)[0]
    assert found["made"] == [2, 2]
    assert found["ended"] == [0, 0]
    assert found["problem"] == "[Errno 28] No space left on device"


def live(address: RankAddress, one: Job, *, fault: str = "") -> list[str]:
    """One run, or with a fault the last rank is lost in a step and all begin again. What is said.

    What was copied arrives as late as it may: when somebody waits for it.
    """
    said: list[str] = []
    asked, step, steps = Event(), Engine.step, []
    bring, close = Downloads._bring, Saver.close

    def late(downloads: Downloads, *given: Any) -> None:
        assert asked.wait(600)
        bring(downloads, *given)

    def asks(method: Any) -> Any:
        def call(saver: Saver, *given: Any, **settings: Any) -> Any:
            asked.set()
            found = method(saver, *given, **settings)
            asked.clear()
            return found

        return call

    def fails(engine: Engine, *given: Any, **settings: Any) -> Any:
        steps.append(0)
        if fault == "lost" and address.rank == 1 and len(steps) == LOST_AT:
            raise RuntimeError("this rank is lost")
        return step(engine, *given, **settings)

    with Rendezvous(address, 60.0) as rendezvous, pytest.MonkeyPatch.context() as patch:
        life = RankLife(rendezvous, StopSignal())
        patch.setattr(Progress, "warn", lambda _, text: said.append(text))
        patch.setattr(Downloads, "_bring", late)
        patch.setattr(Saver, "_end_copy", asks(Saver._end_copy))
        patch.setattr(Saver, "close", asks(close))
        patch.setattr(Engine, "step", fails)
        patch.setattr("weft.train.saver.SLOTS", STEPS)  # a slow machine skips none
        if fault == "hasty":
            patch.setattr(StillRead, "wait", lambda *_: None)
        if fault == "lost":
            with pytest.raises(Exception, match=r"lost|failed|epoch"):
                life.epoch(one)
        assert life.epoch(one) == STEPS
    return said


def loses_a_rank(address: RankAddress, one: Job) -> list[str]:
    return live(address, one, fault="lost")


def does_not_wait(address: RankAddress, one: Job) -> list[str]:
    return live(address, one, fault="hasty")


def test_a_run_goes_on_from_copies_that_came_beside_training(
    tmp_path: Path, chips: WorkerPool
) -> None:
    """A processor and a chip. Not one bit differs from a run that copies nothing."""
    families = f"{NAME} | cpu"
    whole = on_chips(TWO, tmp_path / "whole", families)
    chips.run(with_chips, live, whole, world_size=2)
    one = on_chips([*TWO, "checkpoint.snapshot_every=1"], tmp_path / "one", families)
    said, _ = chips.run(with_chips, loses_a_rank, one, world_size=2)
    assert f"note: the state after step {LOST_AT - 1} was in memory" in "\n".join(said)
    assert losses(one.out) == losses(whole.out)


def test_an_update_waits_for_the_copy_of_what_it_changes(tmp_path: Path, chips: WorkerPool) -> None:
    """Written beside training, the state is that of its step; without the wait both are named."""
    overrides = [*ONE, "checkpoint.every=1", "checkpoint.keep=9"]
    one = on_chips(overrides, tmp_path / "one", NAME)
    chips.run(with_chips, live, one, world_size=1)
    alone = on_chips([*overrides, "checkpoint.asynchronous=false"], tmp_path / "alone", NAME)
    chips.run(with_chips, live, alone, world_size=1)
    for step in range(1, STEPS + 1):
        name = f"step-{step:08d}/rank-00000.safetensors"
        assert (one.checkpoints / name).read_bytes() == (alone.checkpoints / name).read_bytes()
    events = [each for each in read_events(one.out / EVENTS_FILE) if each.kind == "save_begun"]
    assert [each.step for each in events] == [1, 2, 3, 4]
    assert all(each.facts.get("stall_s", 1) > 0 for each in events)
    with pytest.raises(RanksFailedError) as caught:
        chips.run(with_chips, does_not_wait, replace(one, out=tmp_path / "hasty"), world_size=1)
    words = str(caught.value)
    assert "what copy to the host on stream" in words
    assert "reads: no event makes it wait (at weft/optim/" in words
