"""A run goes on under other plans while it trains, as a command asks, and without files."""

import json
import signal
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run
from weft.config.errors import STOPPED, ConfigError
from weft.elastic.move import REQUEST_FILE, ask
from weft.plan.plan import Plan
from weft.report.events import EVENTS_FILE, read_events

EXACT = 1e-10
IN_FP64 = (
    *["compute.precision=fp64", "checkpoint.every=0", "checkpoint.minutes=0"],
    *["train.steps=100000", "train.eval_every=0"],
)
"""It trains until it is stopped."""


def test_a_run_moves_to_other_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To its own plan: not one bit differs. Then to a third rank, and to one alone."""
    answers = []

    def moved(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["elastic", "move", "mine", *words])
        return (code, *capsys.readouterr())

    with commands.started(here, "mine", *IN_FP64) as command:
        command.wait_for_step(3)
        first = command.ranks()
        for words in (["plan.shares=[2,1]"], ["plan.shares=[1,1,1]"], ["--ranks", "1"]):
            code, said, problem = moved(*words, "--json")
            assert code == 0, problem
            answers.append(json.loads(said))
            if len(answers) == 2:
                assert command.rank(1) == first[1]
                assert command.rank(2) not in first.values()
        refused = moved("plan.stages=[{layers: 5}, {}]")
        nothing = moved()
        assert first[0] in command.alive(), "rank 0 is the process that it was"
        assert not list((command.out / "checkpoints").iterdir()), "nothing was written"
        command.process.send_signal(signal.SIGINT)
        code, _, errors = command.finish()
    assert code == STOPPED, errors
    assert refused[0] == 2
    assert "plan.stages" in refused[2]
    assert nothing[0] == 2 and "--ranks, --plan or KEY=VALUE = null" in nothing[2]
    assert [answer["words"].partition(";")[0] for answer in answers] == [
        "2 ranks: 1 + 1, as before",
        "3 ranks: 1 + 1 + 1, instead of 2 ranks: 1 + 1",
        "1 rank, instead of 3 ranks: 1 + 1 + 1",
    ]
    assert all(answer["step"] > answer["after_step"] > 0 for answer in answers)
    at = answers[1]["after_step"]
    mine = commands.steps(here / "mine")
    until = ["--steps", str(len(mine))]
    assert run(["train", "tiny.yaml", "--out", "whole", "--quiet", *IN_FP64, *until]) == 0
    whole = commands.steps(here / "whole")
    assert [row["loss"] for row in mine[:at]] == [row["loss"] for row in whole[:at]]
    for key in ("loss", "grad_norm"):
        values = [row[key] for row in whole]
        assert [row[key] for row in mine] == pytest.approx(values, rel=EXACT)
    assert [row["data"] for row in mine] == [row["data"] for row in whole]
    events = read_events(here / "mine" / EVENTS_FILE)
    assert [e.step for e in events if e.kind == "move"] == [a["after_step"] for a in answers]
    assert [e.facts["source"] for e in events if e.kind == "restore"] == ["memory"] * 3
    assert not list((here / "mine").glob(".*"))


def test_what_cannot_move_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["elastic", "move", str(finished), "--ranks", "1"]) == 2
    assert "expected a run that trains now and can take other plans" in capsys.readouterr().err
    assert run(["elastic", "move", str(finished / "nope"), "--ranks", "1"]) == 2
    assert "There is no such folder" in capsys.readouterr().err


def test_one_request_at_a_time(tmp_path: Path, finished: Path) -> None:
    plan = Plan.from_json((finished / "plan.json").read_text())
    ask(tmp_path, plan)
    with pytest.raises(ConfigError, match="expected a run without a pending request"):
        ask(tmp_path, plan)
    assert [path.name for path in tmp_path.iterdir()] == [REQUEST_FILE]
