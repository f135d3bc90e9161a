"""When ranks write checkpoints themselves, and when they have an agent do it."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.checkpoint.agent.lease import Lease
from weft.checkpoint.draft import draft
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.remote import owner as owner_of
from weft.checkpoint.remote.owner import Owner
from weft.checkpoint.remote.path import RemotePath, remote_path
from weft.checkpoint.store import hold, is_free
from weft.comm.abort import Abort
from weft.comm.comm import Comm
from weft.config.load import load_config
from weft.report.events import EVENTS_FILE, EventLog, read_events
from weft.train import saver, saving
from weft.train.saver import Saver


def alone(root: Path, *overrides: str, to: RemotePath | None = None) -> Saver:
    """Of a run of one process."""
    run: Any = SimpleNamespace(
        config=load_config("debug", overrides).config,
        comm=Comm(timeout_s=0.1),
        is_main=True,
        built=SimpleNamespace(
            gradients=SimpleNamespace(mains=[], frozen=[]),
            meeting=None,
            histories=SimpleNamespace(kept=tuple),
        ),
        lease=Lease(),
        events=EventLog(root),
        abort=Abort(),
    )
    return Saver(run, to or root, root, owner=Owner(), fingerprint="same", tell=lambda _: None)


def test_ranks_do_not_write_while_an_earlier_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from memory did not wait for it before: its own saves do."""
    saved: list[int] = []

    def save(_run: object, root: Path, step: int, **_: object) -> None:
        assert is_free(root, 0.0)
        saved.append(step)

    monkeypatch.setattr(saver, "save", save)
    one, handle = alone(tmp_path, "checkpoint.asynchronous=false"), hold(tmp_path)
    for each in (one.save, one.save_last):
        with pytest.raises(CheckpointError, match=r"an earlier run still writes into .*wait, or"):
            each(3, finite=True)

    def ends(held: Path, limit_s: float) -> bool:
        os.close(handle)
        return is_free(held, limit_s)

    monkeypatch.setattr(saving, "is_free", ends)
    one.save(4, finite=True)
    one.save_last(5, finite=True)
    assert saved == [4, 5]


def test_a_kept_copy_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart it is there still, and the first copies take its place."""

    class Kept:
        num_bytes = 1000

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> "Kept":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def none_found(_: Saver) -> tuple[str, bool]:
        raise OSError("enough of it")

    monkeypatch.setattr(saver, "MemoryOfMachine", Kept)
    monkeypatch.setattr(Saver, "_found", none_found)
    shards: Any = [SimpleNamespace(tensor=torch.zeros(600, dtype=torch.uint8))]
    said = []
    for free in (1500, 1300):  # two copies of 600 bytes may take half of it and of what is kept
        monkeypatch.setattr(saver, "free_memory_bytes", lambda free=free: free)
        said.append(alone(tmp_path)._problem(shards))
    assert said == [
        "no process could be started for it: enough of it",
        "copies of their state need 0.0 GiB of host memory, more than 50% of what is free",
    ]


def test_a_run_begins_while_storage_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go on from memory; whose turn it is is asked with the first save."""
    asked = []

    def no_answer(root: RemotePath) -> None:
        asked.append(root)
        raise CheckpointError("does not answer", file=root)

    monkeypatch.setattr(owner_of, "_read", no_answer)
    to = remote_path("s3://bucket/runs", "checkpoint.to")
    one = alone(tmp_path, to=to)
    assert not asked
    with pytest.raises(CheckpointError, match="does not answer"):
        draft(to, 1, "first", one._owner).begin()


def test_copies_of_the_last_minute_are_told_when_a_run_ends(tmp_path: Path) -> None:
    one = alone(tmp_path)
    for step in (1, 2, 3):
        one._newest = step
        one._note_copy(step, 0.5, is_written=False)
    one.leave(None, None, None)
    one.leave(None, None, None)
    found = read_events(tmp_path / EVENTS_FILE)
    assert [(e.kind, e.step, e.facts) for e in found] == [
        ("snapshot", 1, {"stall_s": 0.5, "copies": 1}),
        ("snapshot", 3, {"stall_s": 1.0, "copies": 2}),
    ]
