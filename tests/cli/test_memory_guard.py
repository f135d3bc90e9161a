"""What cannot fit in this machine's memory is refused before anything starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.cli.target import load
from weft.cluster.cluster import Cluster
from weft.plan.plan_file import PlanFile
from weft.platform.detect import detect_node
from weft.resolve.memory_here import needs_here, way_out
from weft.resolve.resolve import resolve

LARGE = ("debug", "model.size=llama3-8b", "compute.device=cpu", "compute.precision=fp32")
OnMachine = Callable[[float], Cluster]


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> OnMachine:
    """``on_machine(24)``: this machine has no GPU, and so much memory."""

    def make(memory_gib: float) -> Cluster:
        node = replace(detect_node(), memory_gib=memory_gib, chips=())
        cluster = Cluster(nodes=(node,))
        monkeypatch.setattr("weft.cli.resolved.detect", lambda: cluster)
        return cluster

    return make


def test_a_run_that_is_too_large_is_refused(
    here: Path, on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine(24.0)
    assert run(["train", *LARGE, "--out", "mine"]) == 2
    *table, heading, problem, where = capsys.readouterr().err.splitlines()
    columns, rows = table[0].split(), [line.split() for line in table[1:]]
    assert columns[:6] == ["pipeline", "stage", "ranks", "GiB", "of", "weights"]
    assert [row[:2] for row in rows] == [["0-1", "0"]]
    assert heading == "error: the configuration is not valid"
    assert problem.startswith(
        "  model.size = 'llama3-8b': expected a run that fits in memory: ranks 0 to 1 need "
    )
    assert problem.endswith(
        " GiB, and this machine has 24.0 GiB. No change of the plan would do: take a smaller "
        "model, or more machines. compute.check_memory=false starts all the same."
    )
    assert where == "      on the command line"
    assert not (here / "mine").exists()


def test_it_can_be_started_all_the_same(here: Path, on_machine: OnMachine) -> None:
    """Also what was planned before: the plan in the file is the plan that is run."""
    on_machine(0.1)
    assert run(["plan", "tiny.yaml", "compute.check_memory=false", "--out", "plan.json"]) == 0
    arguments = ["train", "tiny.yaml", "--out", "mine", "--quiet", "train.steps=1"]
    arguments += ["plan.file=plan.json"]
    assert run(arguments) == 2
    assert not (here / "mine").exists()
    assert run([*arguments, "compute.check_memory=false"]) == 0
    planned = PlanFile.read((here / "plan.json").read_text())
    assert PlanFile.read((here / "mine/plan.json").read_text()).plan == planned.plan
    assert sum(used.ranks for used in planned.chips) == planned.plan.world_size


def test_plan_says_so_without_a_profile(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit code of ``weft train``, which would refuse it."""
    on_machine(24.0)
    assert run(["plan", *LARGE]) == 2
    said = capsys.readouterr()
    assert "no forecast: " in said.err
    assert "GiB" in said.out
    assert "does not fit: ranks 0 to 1 need " in said.out
    assert run(["plan", *LARGE, "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert not data["fits"] and data["plan"]["num_layers"] == 32
    assert data["problem"].startswith("ranks 0 to 1 need ")
    assert data["problem"].endswith("take a smaller model, or more machines.")
    assert run(["plan", *LARGE, "compute.check_memory=false"]) == 0
    assert "does not fit: ranks 0 to 1 need " in capsys.readouterr().out
    on_machine(2000.0)
    assert run(["plan", *LARGE]) == 0
    said = capsys.readouterr()
    assert "GiB" in said.out
    assert "does not fit" not in said.out


def test_the_smallest_change_that_would_do_is_named(on_machine: OnMachine) -> None:
    """Between what a plan takes and what it takes with layers that are computed again."""
    words = ["model.size=demo-5m", "data.seq_len=2048", "batch.micro=1", "plan.shares=[1]"]
    words += ["batch.samples=8", "batch.accumulation=null", "compute.device=cpu"]
    loaded = load("debug", [*words, "compute.precision=fp32", "compute.recompute=off"])
    resolved = resolve(loaded, on_machine(1000.0))
    again = resolved.plan.each(lambda stage: replace(stage, recompute="full"))
    (most,), (least,) = (needs_here(resolved, plan, [0]) for plan in (resolved.plan, again))
    assert least.need_gib < most.need_gib
    short = replace(resolved, cluster=on_machine((most.need_gib + least.need_gib) / 2))
    assert not needs_here(short, resolved.plan, [0])[0].fits
    assert (
        way_out(short, [0])
        == "Compute layers again in backward (activation checkpointing, recompute: full)."
    )
