"""Runs of a folder: what they are told to be, and what of them is deleted and never deleted."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.train import run_list
from weft.train.run_folder import RunFolder
from weft.train.run_list import (
    change_in_words,
    chosen,
    delete_run,
    list_runs,
    plan_in_words,
    run_facts,
    superfluous_checkpoints,
    why_not,
)


def make(root: Path, name: str, *, steps: int = 3, loss: float | None = 2.5, **more: str) -> Path:
    """A run with so many steps done of three."""
    run = root / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 3}\n")
    (run / "plan.json").write_text(
        '{"num_layers": 1, "pipelines": [{"stages": [{"mesh": {"ranks": [0, 1], "axes": '
        '[["dp", 2], ["tp", 1]]}, "layers": [0, 1]}], "samples": 4, "microbatch": 2}]}'
    )
    lines = [{"step": n + 1, "loss": 3.0} for n in range(steps - 1)]
    lines += [{"step": steps, "loss": loss}] if steps else []
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if steps:
        save(run, steps)
    for file, text in more.items():
        (run / f"{file}.json").write_text(text)
    return run


def save(run: Path, step: int) -> None:
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir()
    (folder / "index.json").write_text('{"files": []}')
    (run / "checkpoints/latest").write_text(f"{folder.name}\n")


def test_states_and_numbers_of_runs(tmp_path: Path) -> None:
    make(tmp_path, "done", summary='{"step": 3, "held_out": {"loss": 2.25}}')
    make(tmp_path, "stopped", steps=2)
    make(tmp_path, "diverged", loss=None)
    make(tmp_path, "empty", steps=0)
    failed = make(tmp_path, "failed", steps=0)
    (failed / "logs").mkdir()
    (failed / "logs/rank0.error").write_text("ValueError")
    imported = tmp_path / "imported"  # as `weft checkpoint import` leaves it: weights, no run yet
    (imported / "checkpoints").mkdir(parents=True)
    save(imported, 0)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "done")
    damaged = make(tmp_path, "damaged", steps=2, summary='{"step": 2}')
    (damaged / "config.yaml").write_text("{")
    (damaged / "plan.json").unlink()
    os.mkfifo(damaged / "plan.json")  # which nobody writes into
    torn = make(tmp_path, "torn", steps=2)
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with RunFolder(make(tmp_path, "running")):
        found = {run.name: run for run in list_runs(tmp_path)}
    states = {name: run.state for name, run in found.items()}
    assert states == {
        "done": "finished",
        "linked": "finished",
        "stopped": "stopped",
        "diverged": "diverged",
        "empty": "empty",
        "failed": "failed",
        "imported": "stopped",
        "damaged": "stopped",  # of how many steps nobody can say
        "torn": "stopped",
        "running": "running",
    }
    done = found["done"]
    assert (done.step, done.steps, done.loss, done.held_out) == (3, 3, 2.5, 2.25)
    assert (done.plan, found["torn"].loss) == ("2 ranks: dp 2", 2.5)
    assert done.bytes >= (tmp_path / "done/plan.json").stat().st_blocks * 512 > 0


def test_a_run_that_skips_bad_steps_has_not_diverged_by_one(tmp_path: Path) -> None:
    """As many in a row as end training are another thing."""
    policy = "train: {steps: 3, stop_after_non_finite: 2}\nrecovery: {when_not_finite: skip}\n"
    finished, stopped, diverged = (
        make(tmp_path, "finished", loss=None, summary='{"step": 3}'),
        make(tmp_path, "stopped", steps=2, loss=None),
        make(tmp_path, "diverged", steps=2, loss=None),
    )
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": null}\n')
    for run in (finished, stopped, diverged):
        (run / "config.yaml").write_text(policy)
        assert run_facts(run).state == run.name


@pytest.mark.parametrize(("scale", "state"), [("null", "diverged"), ("8.0", "finished")])
def test_a_norm_that_is_no_number_counts_as_a_loss(tmp_path: Path, scale: str, state: str) -> None:
    """But where a loss scale was too large for one step."""
    run = make(tmp_path, "run", summary='{"step": 3}')
    last = f'{{"step": 3, "loss": 2.5, "grad_norm": null, "loss_scale": {scale}}}\n'
    (run / "metrics.jsonl").write_text(last)
    assert run_facts(run).state == state


def test_a_run_that_may_go_back_has_not_diverged(tmp_path: Path) -> None:
    """Nor while it does, for the last time."""
    noted = {"never": None, "once": "[[1, 2]]", "on its way": "[[1, 2], 3]"}
    for name, text in {**noted, "too often": "[[1, 2], [3, 3]]"}.items():
        run = make(tmp_path, name, steps=2, loss=None)
        (run / "config.yaml").write_text(
            "train: {steps: 3}\nrecovery: {when_not_finite: rewind, rewinds: 2}\n"
        )
        if text:
            (run / "rewinds.json").write_text(text)
        assert run_facts(run).state == ("stopped" if name in noted else "diverged")


def test_a_damaged_run_is_listed(tmp_path: Path) -> None:
    run = tmp_path / "odd"
    run.mkdir()
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "summary.json", "checkpoints"):
        (run / name).write_bytes(b"[\x00\xff{")
    facts = run_facts(run)
    assert (facts.state, facts.step, facts.steps, facts.plan) == ("empty", 0, None, "?")


def test_rules_are_combined(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        run = make(tmp_path, name, steps=0 if name == "oldest" else 3)
        when = time.time() - age * 86400
        for path in (run / "checkpoints", *run.iterdir()):
            os.utime(path, (when, when))

    def names(*of: str, **rules: object) -> list[str]:
        return [run.name for run in chosen(tmp_path, of, **rules)]

    assert names() == ["new", "older", "oldest"]
    assert names(keep=1) == names(older_than_days=0.5) == ["older", "oldest"]
    assert names(keep=1, states=["empty"]) == ["oldest"]
    assert names("new", str(tmp_path / "older"), older_than_days=0.5) == ["older"]


@pytest.mark.parametrize("name", ["..", ".", "/", "nope", "../outside", "/tmp", "inside/run", ""])
def test_no_other_folder_can_be_named(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    make(tmp_path, "outside")
    make(root / "inside", "run")
    make(root, "one")
    with pytest.raises(ConfigError, match="expected a run in"):
        chosen(root, [name])


def test_what_may_not_be_deleted_says_why(tmp_path: Path) -> None:
    outside = make(tmp_path, "outside")
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(outside)
    assert why_not(run_facts(root / "link")) == "it is a link to another folder"
    busy = run_facts(make(root, "busy"))
    with RunFolder(busy.folder):
        assert why_not(busy) == "a command works in it"
        with pytest.raises(ConfigError, match="no command works"):
            delete_run(busy)
    assert (busy.folder / "plan.json").is_file() and why_not(busy) == ""


def test_what_is_mounted_in_a_run_is_not_deleted(tmp_path: Path) -> None:
    """A folder of the same file system."""
    run, treasure = make(tmp_path / "runs", "a run"), tmp_path / "treasure"
    inside = run / "mnt"
    for folder in (treasure, inside):
        folder.mkdir()
    (treasure / "file").touch()
    command = ["mount", "--bind", str(treasure), str(inside)]
    if not shutil.which("mount") or subprocess.run(command, check=False).returncode:
        pytest.skip("may not mount a folder here (needs root)")
    try:
        assert why_not(run_facts(run)) == "another file system is mounted in it"
    finally:
        subprocess.run(["umount", str(inside)], check=True)
    assert (treasure / "file").exists() and why_not(run_facts(run)) == ""


def test_deleting_follows_no_link(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("gold")
    run = make(tmp_path / "runs", "one")
    (run / "checkpoints/step-00000009").symlink_to(treasure)
    (run / "more").symlink_to(treasure)
    delete_run(run_facts(run))
    assert list((tmp_path / "runs").iterdir()) == []
    assert (treasure / "gold").read_text() == "gold"


def test_a_run_put_in_place_of_one_that_was_looked_at_stays(tmp_path: Path) -> None:
    """Between the look and the deletion, somebody puts a link there."""
    treasure = make(tmp_path, "treasure")
    facts = run_facts(make(tmp_path / "runs", "one"))
    facts.folder.rename(tmp_path / "moved")
    facts.folder.symlink_to(treasure)
    with pytest.raises(OSError, match="one"):
        delete_run(facts)
    assert (treasure / "plan.json").is_file() and (tmp_path / "moved/plan.json").is_file()


def test_a_look_at_a_run_does_not_keep_a_command_out(tmp_path: Path) -> None:
    """`weft runs` holds its lock for a moment; `weft train` waits that long."""
    tries: list[int] = []

    def busy_at_first(handle: int, how: int) -> None:
        tries.append(how)
        if len(tries) == 1:
            raise BlockingIOError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", busy_at_first)
        with RunFolder(tmp_path / "run"):
            assert len(tries) == 2


def test_without_locks_what_was_written_lately_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unknown)
    run = make(tmp_path, "one")
    assert run_list.is_alive(run)
    monkeypatch.setattr(run_list, "QUIET_S", -1.0)
    assert not run_list.is_alive(run)


def test_a_bucket_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of runs needs no storage, no package that speaks to it, and no waiting for it."""

    def opened(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("weft.checkpoint.remote.path.open_files", opened)
    make(tmp_path, "done", summary='{"step": 3, "held_out": {"loss": 2.25}}')
    make(tmp_path, "longer", summary='{"step": 2, "held_out": {"loss": 2.25}}')
    make(tmp_path, "stopped", steps=2)
    make(tmp_path, "empty", steps=0)
    for run in tmp_path.iterdir():
        with (run / "config.yaml").open("a") as file:
            file.write("checkpoint: {to: 's3://bucket/{run}'}\n")
    found = {run.name: run for run in list_runs(tmp_path)}
    assert {name: (run.state, run.step, run.held_out) for name, run in found.items()} == {
        "done": ("finished", 3, 2.25),
        "longer": ("stopped", 3, None),
        "stopped": ("stopped", 2, None),
        "empty": ("empty", 0, None),
    }
    assert superfluous_checkpoints(found["done"]) == ([], 0)


def test_plans_that_differ_in_unlike_parts_are_called_so() -> None:
    stage = StagePlan(mesh=Mesh.of(range(2), tp=2).with_shares(tp=(3, 1)), layers=(0, 2))
    line = PipelinePlan(stages=(stage,), samples=4, microbatch=2)
    plan = Plan(num_layers=2, pipelines=(line,))
    like = plan.each(lambda stage: replace(stage, mesh=replace(stage.mesh, unlike=())))
    words = [plan_in_words(each) for each in (plan, like)]
    assert words == ["2 ranks: tp 2 (3:1)", "2 ranks: tp 2"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (0, 2)}, "2 ranks: dp 2, as before"),
        ({"zero": 2}, "2 ranks: dp 2, with zero 2 instead of 0"),
        ({"recompute": "full"}, "2 ranks: dp 2, with recompute full instead of off"),
        ({"mesh": Mesh.of((1, 0), dp=2)}, "2 ranks: dp 2, in another order"),
        ({"sample_shares": (2, 1)}, "2 ranks: dp 2, with 2:1 shares instead of even"),
        ({"mesh": Mesh.of(range(2), tp=2)}, "2 ranks: tp 2, instead of 2 ranks: dp 2"),
    ],
)
def test_what_differs_of_plans_is_said(change: dict[str, Any], words: str) -> None:
    stage = StagePlan(mesh=Mesh.of(range(2), dp=2), layers=(0, 2))
    line = PipelinePlan(stages=(stage,), samples=4, microbatch=2)
    plan = Plan(num_layers=2, pipelines=(line,))
    after = plan.each(lambda stage: replace(stage, **change))
    assert change_in_words(plan, after) == words
