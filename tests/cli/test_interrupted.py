"""Ctrl-C ends every command in a word, whatever it is at, and SIGTERM one that trains."""

import os
import signal
from typing import Any

import pytest

import weft.__main__ as module
from weft.cli import main
from weft.elastic.signals import Handlers


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["app", "config_schema"])
def test_it_is_stopped_and_no_failure(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While commands are put together, and inside of one."""
    monkeypatch.setattr(main, where, interrupted)
    assert main.run(["schema"]) == 75
    assert capsys.readouterr().err == "stopped\n"


def test_a_pipe_that_ends_is_a_fault_and_no_wish_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any, **__: Any) -> None:
        raise EOFError

    monkeypatch.setattr(main, "config_schema", ended)
    with pytest.raises(EOFError):
        main.run(["schema"])


def test_what_comes_before_any_command_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "main", interrupted)
    codes = list[int]()
    monkeypatch.setattr(module.os, "_exit", codes.append)
    module.start()
    assert codes == [75]
    assert capsys.readouterr().err == "stopped before it began\n"


def test_job_systems_stop_training_before_it_begins_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their signal comes while Python still imports the command."""
    monkeypatch.setattr(main, "main", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(module.sys, "argv", ["weft", "train", "debug"])
    codes = list[int]()
    monkeypatch.setattr(module.os, "_exit", codes.append)
    with Handlers({signal.SIGTERM: signal.SIG_IGN}):
        module.start()
    assert codes == [75]
    assert capsys.readouterr().err == "stopped before it began\n"
