"""The same command under torchrun: the same losses, one refusal, and a stop that saves."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"


def test_torchrun_computes_what_weft_computes(
    here: Path, whole_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by SIGTERM to torchrun, as job systems do, it goes on where it saved."""
    out = here / "mine"
    with commands.started(here, "mine", launcher=f"{TORCHRUN} 2 -m weft") as command:
        command.wait_for_step(5)
        assert run(["train", "tiny.yaml", "--out", "mine"]) == 2
        assert "no other `weft train` is working in" in capsys.readouterr().err
        os.kill(command.process.pid, signal.SIGTERM)
        code, _, errors = command.finish()
        assert command.is_gone()
    assert code != 0
    done = commands.steps(out)[-1]["step"]
    assert 5 <= done < 30
    assert f"stopped before step 30; saved: step {done}; " in errors
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet"]) == 0
    assert commands.numbers(out) == commands.numbers(whole_run("fp32"))
    assert (out / "logs/rank1.log").read_text() == ""


def test_a_refusal_is_printed_once_and_leaves_nothing(here: Path) -> None:
    before = commands.contents(here)
    arguments = ("data.path=none.txt", "--quiet")
    launcher = f"{TORCHRUN} 2 -m weft"
    with commands.started(here, "mine", *arguments, launcher=launcher) as command:
        code, output, errors = command.finish()
    assert (code, output) == (1, "")  # torchrun's own code for a rank that ended with 2
    assert errors.count("error: data.path = 'none.txt': expected a file or a folder") == 1
    assert commands.contents(here) == before
