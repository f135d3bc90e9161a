"""``weft train plan=auto``: chosen once, kept on a resume, and one plan for all of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli import commands
from ports import free_port
from resolve import profiles

from weft.cli.main import run
from weft.cli.plan import waiting
from weft.plan.plan import Plan
from weft.platform.detect import detect_node

SHORT = ("plan=auto", "train.steps=4", "train.eval_every=0")


def plan(out: Path) -> Plan:
    return Plan.from_json((out / "plan.json").read_text())


def test_a_chosen_plan_trains_and_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "tiny.yaml", *SHORT, "plan.auto.ranks=2", "--out", "mine"]
    assert run([*asked, "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "plan.auto chose " in printed
    assert "rates from an average core, as this CPU has no profile" in printed
    assert (
        "No time was predicted: there is no profile for this CPU; run `weft chips profile`"
        in printed
    )
    chosen = plan(here / "mine")
    assert (chosen.world_size, chosen.global_batch) == (2, 24)
    assert json.loads((here / "mine/auto.json").read_text())["asked"]["samples"] == 24
    assert run(asked) == 0
    assert "plan.auto keeps the plan of the run's last start" in capsys.readouterr().out
    assert plan(here / "mine") == chosen
    assert [record["step"] for record in commands.steps(here / "mine")] == [1, 2, 3, 4]
    assert run([*asked, "plan.auto.ranks=1", "train.steps=5"]) == 0
    assert "plan.auto plans again: chips was " in capsys.readouterr().out
    assert plan(here / "mine").world_size == 1


def test_how_far_a_search_is(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_LINES", 0.0)
    asked = ["train", "tiny.yaml", *SHORT, "plan.auto.ranks=2", "--steps", "1"]
    assert run([*asked, "--out", "told"]) == 0
    assert "candidates done" in capsys.readouterr().err
    assert run([*asked, "--out", "not", "--quiet"]) == 0
    assert "candidates done" not in capsys.readouterr().err


def test_a_measured_machine_is_predicted(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_PROFILES", str(here / "profiles"))
    profiles.save(here / "profiles", detect_node())
    assert run(["train", "tiny.yaml", *SHORT, "--out", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["prediction"]
    assert found["predicted"]["step_time_s"] > 0
    assert found["basis"][0].startswith("a profile of")


def test_ranks_of_another_launcher_hear_of_one_plan(here: Path) -> None:
    """Two commands that know nothing of each other; the second is told what to run."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**address, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    with (
        commands.started(here, "mine", *SHORT, environment=ranks[0]) as first,
        commands.started(here, "mine", *SHORT, environment=ranks[1]) as second,
    ):
        ends = [command.finish() for command in (first, second)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "plan.auto chose " in ends[0][1]
    assert plan(here / "mine").world_size == 2
    assert len(commands.steps(here / "mine")) == 4


def test_what_rank_0_refuses_all_refuse(here: Path) -> None:
    before = commands.contents(here)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    asked = (*SHORT, "plan.auto.cluster=none.yaml")
    with (
        commands.started(here, "mine", *asked, environment={"RANK": "0", **address}) as first,
        commands.started(here, "mine", *asked, environment={"RANK": "1", **address}) as second,
    ):
        ends = [command.finish() for command in (first, second)]
    message = "CLUSTER = 'none.yaml': expected a YAML file that describes a cluster."
    assert [code for code, _, _ in ends] == [2, 2]
    assert message in ends[0][2]
    assert f"rank 0 refused: {message}" in ends[1][2]
    assert commands.contents(here) == before


def test_one_process_of_a_launcher_asks_nobody(here: Path) -> None:
    """Nothing listens at the port that it was given, nor does anybody have to."""
    address = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}
    with commands.started(here, "mine", *SHORT, environment=address) as alone:
        code, output, _ = alone.finish()
    assert code == 0
    assert "plan.auto chose " in output
    assert plan(here / "mine").world_size == 1
