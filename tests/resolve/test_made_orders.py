"""``plan.schedule: made``: the order of stages that somebody gives, for what they are predicted to
take."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from train.small_jobs import LAPTOP

from weft.cli.main import run
from weft.cluster.cluster import Cluster
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.planner.fit import shortages
from weft.planner.problem import Problem
from weft.resolve.orders import ordered
from weft.resolve.rank_chips import RankChips, chips_of_file
from weft.resolve.resolve import Resolved, read_plan, resolve

SLOW = """\
hosts:
  - {name: h1, chips: [{kind: big, speed: 1.0, memory_gib: 2}]}
  - {name: h2, chips: [{kind: big, speed: 1.0, memory_gib: 2}]}
links: {between: {gbit: 0.02}}
"""
BATCH = ["batch.samples=32", "batch.micro=2", "compute.precision=fp32"]
TWO = "plan.stages=[{layers: 1}, {}]"
MADE = "plan.schedule=made"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Two equal hosts and a slow link."""
    file = tmp_path / "slow.yaml"
    file.write_text(SLOW)
    return file


def resolved(*asked: str, chips: RankChips | None = None) -> Resolved:
    loaded, machine = load_config("debug", [*BATCH, *asked]), Cluster(nodes=(LAPTOP,))
    makes = None if chips is None else lambda found: ordered(found, chips)
    return resolve(loaded, machine, plan=read_plan(loaded), makes=makes)


def on(chips: RankChips, found: Resolved) -> Problem:
    return Problem(found.workload, chips.view, chips.knowledge)


def test_it_saves_time_in_the_room_there_is(slow: Path) -> None:
    chips = chips_of_file(slow, LAPTOP, 2)
    usual, made = resolved(TWO), resolved(TWO, MADE, chips=chips)
    (before,), (after,) = usual.plan.pipelines, made.plan.pipelines
    assert after.lists
    assert replace(after, lists=(), schedule="1f1b") == before, "nothing but the order is another"
    there = on(chips, made)
    assert there.time(made.plan).step_s < there.time(usual.plan).step_s / 1.2
    assert any("with a list made for it: a step of" in note for note in made.notes)

    low, high = (max(m.total for m in there.memory(p).values()) for p in (usual.plan, made.plan))
    room = there.options.memory_part * 2 * 2**30
    less = there.with_memory((low + (high - low) / 3) / room)
    fits = resolved(TWO, MADE, chips=replace(chips, view=less.cluster))
    assert not shortages(fits.plan, less), "and more would not fit"
    assert shortages(made.plan, less) and fits.plan != usual.plan


def test_meshes_of_two_stages_are_laid_as_is_fastest_and_fits(slow: Path) -> None:
    """In a V, whose first mesh also has the head; interleaved where it has no room for that; and
    with fewer in flight than any name has where there is none for those."""
    two = ["plan.stages=[{split: [1, 2]}, {split: [2, 1]}]", "model.num_layers=6"]
    two += ["data.vocab_size=20000"]
    usual = {name: resolved(*two, f"plan.schedule={name}") for name in ("interleaved", "zb-v")}
    least = 1.05  # not more: what is sent on and back shares a port
    expected = {2: "zb-v", 0.45: "interleaved", 0.42: "interleaved"}
    for gib, name in expected.items():
        slow.write_text(SLOW.replace("memory_gib: 2", f"memory_gib: {gib}", 1))
        chips = chips_of_file(slow, LAPTOP, 2)
        made = resolved(*two, MADE, "plan.chunks=2", chips=chips)
        there, (line,) = on(chips, made), made.plan.pipelines
        assert not shortages(made.plan, there)
        (alike,) = usual[name].plan.pipelines
        assert line.lists and replace(line, lists=()) == alike, "stages are where the name has them"
        fits = [each for each in usual.values() if not shortages(each.plan, there)]
        seconds = [there.time(each.plan).step_s for each in fits]
        assert there.time(made.plan).step_s < min(seconds, default=inf) / least
        assert bool(fits) == (gib > 0.42) == ("for which there is room" not in f"{made.notes}")


def test_only_who_asks_has_it_made(slow: Path) -> None:
    """The slowest pipeline keeps its name, so that the other gains nothing."""
    chips = chips_of_file(slow, LAPTOP, 2)
    four = replace(chips, view=ClusterView((replace(chips.view.pools[0], num_nodes=4),)))
    stages = "stages: [{layers: 1}, {}]"
    for first, second, expected in (
        ("1f1b", "made", (False, False)),
        ("made", "1f1b", (True, False)),
    ):
        pipelines = f"[{{share: 3, schedule: {first}, {stages}}}, {{schedule: {second}, {stages}}}]"
        found = resolved(f"plan.pipelines={pipelines}", chips=four).plan
        assert tuple(each.order != "1f1b" for each in found.pipelines) == expected


def test_a_plan_for_a_file_is_run_as_it_was_made(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = slow.with_name("plan.json")
    words = ["plan", "debug", *BATCH, "--cluster", str(slow), "--out", str(out), "--json"]
    assert run([*words, TWO, MADE]) == 0
    said = json.loads(capsys.readouterr().out)
    found = resolved(f"plan.file={out}", "batch.micro=null").plan
    assert found.pipelines[0].lists == tuple(said["plan"]["pipelines"][0]["lists"])


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        ("plan.domains=nodes", "domains"),
        ("plan.border=bf16", "border"),
        ("plan.stages=[{}, {dp: 2, zero: 1, state_shares: [1, 2]}]", "state_shares"),
    ],
)
def test_what_parts_of_a_head_do_not_know_is_said_by_its_key(beside: str, name: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        resolved("model.tied=false", TWO, "plan.head=[1,1]", beside)
    message = "plan.head = [1, 1]: expected null. Parts of the head are for plans without "
    assert f"{message}{name}. null: the last has the whole head." in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([TWO], "plan.schedule = 'made': expected a schedule's name where the chips of ranks are"),
        ([TWO, "plan.head=[1,1]"], 'plan.head = [1, 1]: expected null with the schedule "made"'),
        ([TWO, "plan.in_flight=[2,1]"], "It is made too."),
        ([TWO, "plan.chunks=1"], 'plan.chunks = 1: expected at least 2 with the schedule "made"'),
        (["plan.file=plan.json"], "plan.schedule = 'made': expected null with plan.file."),
        (["plan.shares=[1]"], "expected null where no pipeline of several stages is left to it"),
    ],
)
def test_what_has_no_made_order_is_refused(asked: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        resolved(MADE, *asked)
    assert message in str(refused.value)
