"""The process that writes checkpoints of a machine, where storage is far away and fails."""

from pathlib import Path

import pytest
from checkpoint.servers import BUCKET, S3, s3_server
from checkpoint.test_agent import Machine, machine, until

from weft.checkpoint.agent.wire import Failed, Saved
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.store import is_free
from weft.checkpoint.verify import verify


def saved(one: Machine, step: int) -> Saved | Failed:
    one.copy(step, 0, 1)
    one.commit(step)
    (event,) = one.wait()
    return event


def test_storage_that_fails_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses, hangs up and is gone: that save is given up and said, and the next one works."""
    with s3_server(monkeypatch) as s3:
        root = s3.place()
        held = tmp_path / "logs"
        with machine(tmp_path, held) as one:
            one.root = root
            assert isinstance(saved(one, 1), Saved)
            assert not is_free(held, 0.0)
            s3.refuses = lambda method, path: method == "PUT" and "rank-00001" in path
            failed = saved(one, 2)
            assert isinstance(failed, Failed)
            file = f"s3://{BUCKET}/runs/one/step-00000002/rank-00001-save2.safetensors"
            assert failed.problem.startswith(f"{file}: cannot be written: ")
            assert "Access Denied" in failed.problem
            s3.refuses = lambda method, path: False
            assert (open_checkpoint(root).step, verify(root).ok) == (1, True)
            assert isinstance(saved(one, 3), Saved)
            s3.hangs_up = lambda method, path: method == "PUT" and "rank-00000" in path
            failed = saved(one, 4)
            assert isinstance(failed, Failed)
            assert "rank-00000-save4.safetensors: cannot be written: " in failed.problem
            s3.hangs_up = lambda method, path: False
            assert (open_checkpoint(root).step, verify(root).ok) == (3, True)
            assert isinstance(saved(one, 5), Saved)
            check_slow(one, s3)
            assert one.leave() == 0
        assert [key for key in s3.names() if "index" in key] == [
            f"runs/one/step-0000000{step}/index.json" for step in (6, 7)
        ]
        assert (open_checkpoint(root).state["seed"], verify(root).ok) == (7, True)
        assert s3.unfinished() == []
        log = one.log.read_text()
        assert "secret-of-tests" not in log
        assert log.count("CheckpointError") == 2


def check_slow(one: Machine, s3: S3) -> None:
    """Storage takes a file and says nothing: ranks go on and copy, as far as there is room, the
    checkpoint before stays the latest, and what waited becomes checkpoints in its turn."""
    s3.holds = lambda method, path: method == "PUT" and "rank-00001-save6" in path
    for step in (6, 7):
        assert one.ranks[0].has_room
        one.copy(step, 0, 1)
        one.commit(step)
    assert not one.ranks[0].has_room, "the next save would be left out, and that said"
    until(lambda: s3.held)
    assert one.ranks[0].events() == []
    assert (open_checkpoint(one.root).step, verify(one.root).ok) == (5, True)
    s3.released.set()
    first, second = one.wait()
    assert isinstance(first, Saved) and isinstance(second, Saved)
    assert (first.step, second.step) == (6, 7)


def test_two_machines_meet_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as s3:
        held = tmp_path / "logs"
        root = s3.place()
        with machine(tmp_path / "a", held, [0]) as first, machine(tmp_path / "b", held, [1]) as two:
            first.root = two.root = root
            two.copy(1, 1)
            first.copy(1, 0)
            first.commit(1)
            (event,) = first.wait()
            assert isinstance(event, Saved)
            two.wait()
        assert verify(root).ok
        assert not any("facts" in key or "held" in key or "/save-" in key for key in s3.names())
