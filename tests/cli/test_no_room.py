"""A disk that is full is said in a sentence: it is no fault of the program."""

from pathlib import Path

import pytest
from limits import file_size_limit

from weft.cli.main import run
from weft.config.errors import no_room
from weft.elastic.failure import Failure
from weft.elastic.rank_process import described

WAY = (
    "Make room where it writes (weft runs prune NAME --checkpoints removes older ones of a run), "
    "and give the same command again"
)


def test_a_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with file_size_limit(0):
        assert run(["plan", "debug", "plan.shares=[1]", "--out", "plan.json"]) == 1
    assert f"error: File too large. {WAY}" in " ".join(capsys.readouterr().err.split())


def test_a_rank_says_so_without_a_trace() -> None:
    full, other = OSError(28, "No space left on device", "/d/x"), OSError(5, "Input/output error")
    failure = described(3, full)
    assert failure == Failure(
        3, "machine", f"/d/x: No space left on device. {WAY}", when=failure.when
    )
    assert described(3, other).detail and not no_room(other)
