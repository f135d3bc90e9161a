"""A long search in a terminal: Ctrl-C and a limit end it with the best so far."""

import json
import signal
import subprocess
from math import inf
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run
from weft.cli.plan import waiting
from weft.elastic import signals
from weft.planner.search.found import ENDED_EARLY

POOLS = """pools:
  - {chip: H100-SXM5-80GB, nodes: 1, chips_per_node: 2, network_gbit: 100}
  - {chip: A100-SXM4-80GB, nodes: 1, chips_per_node: 2, network_gbit: 100}
  - {chip: RTX4090, nodes: 1, chips_per_node: 2, network_gbit: 25}
  - {chip: T4, nodes: 1, chips_per_node: 2, network_gbit: 10}
"""
WORDS = (
    *["plan", "demo", "model.size=llama3.2-1b", "data.seq_len=2048", "batch.samples=64"],
    *["--cluster", "four.yaml"],
)
"""Takes two minutes."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("four.yaml").write_text(POOLS)
    return tmp_path


def test_ctrl_c_shows_the_best_so_far(here: Path) -> None:
    """As its lines tell it, and what was asked for is written."""
    command = [*commands.COLD, *WORDS, "--out", "plan.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=here, env=commands.ENVIRONMENT, **pipes) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "the best takes" in line:
                    break
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=commands.TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "ending the search with the best so far" in errors
    assert "predicted: " in said and ENDED_EARLY in said
    assert json.loads((here / "plan.json").read_text())["pipelines"]


def test_a_limit_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "--minutes", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert found["cut_short"] and not found["exhausts"] and 0 < found["gap"] < 1
    assert run([*WORDS[:-2], "--minutes", "1"]) == 2
    assert "--minutes = 1.0: expected --cluster beside it" in capsys.readouterr().err


def test_who_asks_twice_or_before_anything_fits_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals of one Ctrl-C, which may reach a process twice, are one."""
    before = signal.getsignal(signal.SIGINT)
    with waiting.watched(None) as watch:
        watch.tell(1, inf)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with waiting.watched(None) as watch:
        watch.tell(1, 2.0)
        assert not watch.is_over
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert watch.is_over
        monkeypatch.setattr(signals, "SAME_REQUEST_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_lines_say_that_candidates_are_done_and_then_refined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(waiting, "monotonic", lambda: now_s)
    watch = waiting.telling()
    for now_s, done in ((1.0, 10), (2.5, 20), (4.0, 30), (5.0, 30), (9.0, 30)):  # noqa: B007
        watch.tell(done, 2.5)
    assert capsys.readouterr().err.splitlines() == [
        "searching: 20 candidates done, the best takes 2.5 s a step",
        "searching: 30 candidates done, the best takes 2.5 s a step",
        "refining the best of what was found, for 5 s",
    ]
