"""The same command under torchrun: the same losses, one refusal, and a stop that saves."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from cli import commands
from limits import within_some_limit
from ports import free_port

from weft.cli.main import run
from weft.comm.address import ARRIVAL_S

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ENDLESS = ("train.steps=100000", "train.eval_every=0")
"""It trains until it is stopped, however busy the machine is."""


def test_torchrun_computes_what_weft_computes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by SIGTERM to torchrun, as job systems do, it goes on where it saved."""
    out, weft = here / "mine", (*TORCHRUN, "2", "-m", "weft")
    with commands.started(here, "mine", *ENDLESS, program=weft) as command:
        command.wait_for_step(5)
        assert run(["train", "tiny.yaml", "--out", "mine"]) == 2
        assert "no other command is working in" in capsys.readouterr().err
        os.kill(command.process.pid, signal.SIGTERM)
        code, _, errors = command.finish()
        assert command.is_gone()
    assert code != 0
    done = commands.steps(out)[-1]["step"]
    assert done >= 5
    assert f"stopped before step 100000; saved: step {done}; " in errors
    until = [*ENDLESS, "--quiet", "--steps", str(done + 5)]
    for folder in ("mine", "whole"):
        assert run(["train", "tiny.yaml", "--out", folder, *until]) == 0
    assert commands.numbers(out) == commands.numbers(here / "whole")
    assert commands.complaints(out / "logs/rank1.log") == []


def test_a_refusal_is_printed_once_and_leaves_nothing(here: Path) -> None:
    before = commands.contents(here)
    arguments = ("data.path=none.txt", "--quiet")
    program = (*TORCHRUN, "2", "-m", "weft")
    with commands.started(here, "mine", *arguments, program=program) as command:
        code, output, errors = command.finish()
    assert (code, output) == (1, "")  # torchrun's own code for a rank that ended with 2
    assert errors.count("error: data.path = 'none.txt': expected a file or a folder") == 1
    assert commands.contents(here) == before


def test_every_rank_says_what_its_own_variables_cannot_be(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = commands.contents(here)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", **address}.items():
        monkeypatch.setenv(name, value)
    for more in ((), ("--nproc-per-node", "1")):
        assert run(["train", "tiny.yaml", "--out", "mine", *more]) == 2
        assert capsys.readouterr().err == (
            "error: MASTER_PORT = '65536': expected a number from 1 to 65535. "
            "Give the same port of rank 0's machine to every process.\n"
        )
    assert commands.contents(here) == before


def test_ranks_with_other_values_are_all_refused(here: Path) -> None:
    """Two machines, two commands that differ: exit code 2 and one message on each."""
    before = commands.contents(here)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        commands.started(here, "mine", environment={"RANK": "0", **address}) as first,
        commands.started(here, "mine", "seed=5", environment={"RANK": "1", **address}) as second,
    ):
        ends = [command.finish() for command in (first, second)]
    message = (
        "error: seed = 5: expected 1234, as on rank 0. Rank 1 differs. "
        "Start the same command, with the same files, on every machine.\n"
    )
    assert [(code, errors) for code, _, errors in ends] == [(2, message)] * 2
    assert commands.contents(here) == before


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            0,
            "error: WORLD_SIZE = 2: expected as many processes to meet within {limit_s:g} s. "
            "Missing: rank 1. Start one process for each rank, on every machine.\n",
        ),
        (
            1,
            "error: MASTER_ADDR = '127.0.0.1:{port}': expected the address and port where rank 0 "
            "can be reached within {limit_s:g} s. ",
        ),
    ],
)
def test_a_rank_that_never_comes_is_named(here: Path, rank: int, message: str) -> None:
    before = commands.contents(here)
    address = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}

    def alone(limit_s: float) -> None:
        port = str(free_port())
        limit = f"train.timeout_s={limit_s:g}"
        environment = {**address, "MASTER_PORT": port}
        with commands.started(here, "mine", limit, environment=environment) as command:
            code, _, errors = command.finish()
        assert code == 2
        assert message.format(port=port, limit_s=limit_s) in errors
        assert "Traceback" not in errors

    within_some_limit(alone, 1.0)
    left = commands.contents(here)
    assert left == before if rank == 0 else set(left) - set(before) <= {"mine", "mine/logs", LOG}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_can_be_stopped(
    here: Path, rank: int, number: signal.Signals
) -> None:
    before, port = commands.contents(here), free_port()
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with commands.started(here, "mine", environment={"RANK": str(rank), **address}) as command:
        command.wait_until(lambda: (here / LOG).exists() if rank else is_heard(port))
        asked = time.monotonic()
        os.kill(command.process.pid, number)
        code, _, errors = command.finish()
    assert time.monotonic() - asked < ARRIVAL_S / 2
    assert (code, errors) == (75, "stopped before training began\n")
    assert rank or commands.contents(here) == before


def is_heard(port: int) -> bool:
    """Somebody listens there."""
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


LOG = "mine/logs/rank1.log"
"""Stays where no rank 0 is there to tidy up."""
