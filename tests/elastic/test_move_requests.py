"""What the launcher answers to whoever asks for another plan."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from resolve.test_resolve import LAPTOP

from weft.cluster.cluster import Cluster
from weft.config.load import load_config
from weft.elastic.failure import ANEW
from weft.elastic.move import (
    ANSWER_FILE,
    MOST_BYTES,
    REQUEST_FILE,
    Moved,
    Moves,
    ask,
    await_answer,
    is_there,
)
from weft.elastic.replan import Replans
from weft.plan.plan import Plan
from weft.resolve.resolve import resolve
from weft.train.job import Job
from weft.train.run_folder import LAUNCHER_FILE, RunFolder

BATCH = ["batch.samples=8", "batch.micro=1", "data.seq_len=32", "compute.device=cpu"]


def plan_of(*overrides: str) -> Plan:
    return resolve(load_config("debug", [*BATCH, *overrides]), Cluster(nodes=(LAPTOP,))).plan


def reach(out: Path, step: int) -> None:
    (out / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')


@pytest.fixture
def replans(tmp_path: Path) -> Replans:
    loaded = load_config("debug", [*BATCH, "plan.shares=[4,4]"])
    now = resolve(loaded, Cluster(nodes=(LAPTOP,)))
    return Replans(
        loaded, now, Job(config=now.config, plan=now.plan, out=tmp_path, last_step=9, threads=1)
    )


@pytest.fixture
def moves(replans: Replans) -> Iterator[Moves]:
    with Moves(replans, lambda _: None) as moves:
        yield moves


def answer(out: Path, name: str) -> Moved:
    """There is one already, as nobody works in the folder."""
    return await_answer(out, name)


def test_a_request_becomes_an_epoch_and_then_an_answer(
    tmp_path: Path, moves: Moves, replans: Replans
) -> None:
    assert not moves.wanted()
    before, name = replans.job.owner, ask(tmp_path, plan_of("plan.shares=[2,2,4]"))
    assert moves.wanted()
    assert moves.wanted(), "until the ranks have come"
    reach(tmp_path, 3)
    epoch = moves.epoch()
    assert (epoch.world_size, epoch.seats) == (3, (0, 1, ANEW))
    assert epoch.args == (replans.job,)
    assert epoch.args[0].plan.world_size == 3
    assert epoch.args[0].owner == before, "it is the same command, and saves as such"
    assert not moves.wanted()
    assert (tmp_path / REQUEST_FILE).exists(), "no step is finished"
    reach(tmp_path, 4)
    assert not moves.wanted()
    found = answer(tmp_path, name)
    assert (found.problem, found.after_step, found.step) == ("", 3, 4)
    assert found.words.startswith("3 ranks: 1 + 1 + 1, instead of 2 ranks: 1 + 1")
    assert not (tmp_path / REQUEST_FILE).exists()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("batch.samples=16", "that add up to batch.samples (8). They add up to 16."),
        ("compute.precision=fp64", "compute.precision = 'fp64': expected "),
    ],
)
def test_another_computation_is_refused(
    tmp_path: Path, moves: Moves, asked: str, problem: str
) -> None:
    name = ask(tmp_path, plan_of("plan.shares=[4,4]", asked))
    assert not moves.wanted()
    assert problem in answer(tmp_path, name).problem


def test_what_is_no_request_is_refused(tmp_path: Path, moves: Moves) -> None:
    (tmp_path / REQUEST_FILE).write_text(json.dumps({"name": "x", "plan": {"pipelines": 3}}))
    assert not moves.wanted()
    assert answer(tmp_path, "x").problem.startswith("the request cannot be read: ")


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a list": lambda file: file.write_text('["name"]'),
    "no plan": lambda file: file.write_text('{"name": "x", "plan": [3]}'),
    "an odd plan": lambda file: file.write_text(json.dumps(asked(pipelines=[[]]))),
    "deep": lambda file: file.write_text("[" * 200_000),
    "too long": lambda file: file.write_bytes(b" " * (MOST_BYTES + 1)),
    "a pipe": os.mkfifo,
    "a link": lambda file: file.symlink_to("nowhere"),
    "a folder": lambda file: (file / "more").mkdir(parents=True),
}


def asked(**other: object) -> dict[str, object]:
    plan = json.loads(plan_of("plan.shares=[8]").to_json())
    return {"name": "x", "plan": {**plan, **other}}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_launcher_outlives_whatever_lies_there(tmp_path: Path, moves: Moves, what: str) -> None:
    """It is answered once and cleared; a folder stays, and is passed over until it is gone."""
    UNREADABLE[what](tmp_path / REQUEST_FILE)
    assert not moves.wanted()
    problem = json.loads((tmp_path / ANSWER_FILE).read_text())["problem"]
    assert problem.startswith("the request cannot be read: ")
    (tmp_path / ANSWER_FILE).unlink()
    assert not moves.wanted()
    assert not (tmp_path / ANSWER_FILE).exists()
    if what == "a folder":
        (tmp_path / REQUEST_FILE).rename(tmp_path / "away")
        assert not moves.wanted()
    assert not os.path.lexists(tmp_path / REQUEST_FILE)
    ask(tmp_path, plan_of("plan.shares=[8]"))
    assert moves.wanted()


def test_ranks_that_are_lost_before_a_step_change_the_answer(
    tmp_path: Path, moves: Moves, replans: Replans
) -> None:
    """They left for three ranks, one of which was lost at once: what runs is told."""
    name = ask(tmp_path, plan_of("plan.shares=[2,2,4]"))
    assert moves.wanted()
    moves.epoch()
    replans.without([2])
    reach(tmp_path, 1)
    assert not moves.wanted()
    words = answer(tmp_path, name).words
    assert words.startswith("2 ranks: ")
    assert ", for ranks were lost; it was to be 3 ranks: 1 + 1 + 1, instead of 2 ranks" in words


def test_what_a_killed_launcher_left_deceives_nobody(tmp_path: Path, replans: Replans) -> None:
    """Another command, which takes no other plans, works there now."""
    Moves(replans, lambda _: None).__enter__()
    name = ask(tmp_path, plan_of("plan.shares=[8]"))
    with RunFolder(tmp_path):
        assert not is_there(tmp_path)
        assert answer(tmp_path, name).problem == "the run is gone"


def test_a_request_that_another_launcher_has_cleared_is_not_waited_for(
    tmp_path: Path, replans: Replans
) -> None:
    name = ask(tmp_path, plan_of("plan.shares=[8]"))
    with RunFolder(tmp_path), Moves(replans, lambda _: None):
        assert is_there(tmp_path)
        assert answer(tmp_path, name).problem == "the run is gone"


def test_a_run_that_ends_says_so(tmp_path: Path, replans: Replans) -> None:
    with Moves(replans, lambda _: None):
        name = ask(tmp_path, plan_of("plan.shares=[8]"))
    assert answer(tmp_path, name).problem == "the run ended before"
    assert answer(tmp_path, "later").problem == "the run is gone"
    assert not (tmp_path / LAUNCHER_FILE).exists()
