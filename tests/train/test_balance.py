"""Shares of pipelines by their speed: what they become, and that nothing else does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.small_jobs import LAPTOP, SMALL, job
from train.test_life import live

from weft.cluster.cluster import Cluster
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import load_config
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.shares import balanced, refuse_unbalanced, shares_in_force, with_shares
from weft.planner.validate import validate_plan
from weft.report.events import EVENTS_FILE, read_events
from weft.resolve.resolve import resolve
from weft.train.balance import PassTimer
from weft.train.job import Job


def plan_of(*samples: int, microbatch: int = 2, in_flight: tuple[int, ...] = ()) -> Plan:
    stages = (StagePlan(mesh=Mesh.of((rank,)), layers=(0, 2)) for rank in range(len(samples)))
    return Plan(
        num_layers=2,
        pipelines=tuple(
            PipelinePlan(stages=(stage,), samples=many, microbatch=microbatch, in_flight=in_flight)
            for stage, many in zip(stages, samples, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("samples", "seconds", "expected"),
    [
        ((8, 8), (1.0, 3.0), (12, 4)),  # three times as fast
        ((8, 8), (1.0, 1.01), (8, 8)),
        ((12, 4), (1.2, 0.8), (11, 5)),  # 10 and 5 a second; to a single sample
        ((8, 8, 8), (1.0, 2.0, 4.0), (14, 7, 3)),
        ((8, 8), (1.0, 1000.0), (14, 2)),  # a micro-batch at least
        ((1, 15), (1.0, 1.0), (1, 15)),
        ((8, 0, 8), (1.0, 0.0, 3.0), (12, 0, 4)),  # one only keeps
    ],
)
def test_samples_go_by_speed(
    samples: tuple[int, ...], seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    found = balanced(plan_of(*samples), seconds)
    assert tuple(pipeline.samples for pipeline in found.pipelines) == expected
    assert with_shares(found, samples) == plan_of(*samples), "nothing else"


def test_as_many_stay_as_are_in_flight() -> None:
    found = balanced(plan_of(8, 8, in_flight=(3, 1)), (1.0, 9.0))
    assert [pipeline.samples for pipeline in found.pipelines] == [10, 6]


def test_a_checkpoint_of_another_plan_says_nothing() -> None:
    now, saved = plan_of(8, 8), plan_of(11, 5)
    assert shares_in_force(now, json.loads(saved.to_json())) == saved
    others = (plan_of(11, 5, microbatch=1), plan_of(11, 6), plan_of(16))
    for saved in others:
        assert shares_in_force(now, json.loads(saved.to_json())) == now
    assert shares_in_force(now, {"pipelines": 3}) == shares_in_force(now, None) == now


ASKED = [
    *SMALL,
    "batch.samples=12",
    "batch.micro=2",
    "compute.precision=fp64",
    "plan.pipelines=[{share: 2, stages: [{layers: 1, dp: 2, zero: 2}, {zero: 2}]}, "
    "{stages: [{zero: 2}]}]",
    "plan.domains=pipelines",
    "train.steps=8",
    "train.eval_every=3",
    "checkpoint.every=3",
]
EVERY = "balance.every=2"
SPEEDS = {2: (1.0, 1.0), 4: (1.0, 3.0), 6: (2.0, 1.0)}
"""After which step, samples a second of both pipelines."""


def at_speeds(address: RankAddress, jobs: list[Job]) -> None:
    """A rank that finds what was written here to be its speed."""

    def taken(timer: PassTimer) -> float:
        run = timer._run
        mine = run.plan.rank_plan(address.rank)
        seconds = mine.pipeline_plan.samples / SPEEDS[run.comm.recorder.step][mine.pipeline]
        return seconds * (0.5 if address.rank == 2 else 1.0)  # a pipeline is as slow as its slowest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassTimer, "taken", taken)
        live(address, jobs)


LISTS = ("3F B F 3B", "4(F B)")
"""Of the first pipeline's four micro-batches."""


def with_lists(given: Job) -> Job:
    first, other = given.plan.pipelines
    return replace(given, plan=replace(given.plan, pipelines=(replace(first, lists=LISTS), other)))


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_shares_change_and_numbers_stay(tmp_path: Path, pool: WorkerPool) -> None:
    """Losses, norms and data of every step, evaluations too; killed in between as well. A list is
    made anew for each number of micro-batches, from times that no two runs measure alike."""
    whole, plain, parts = (tmp_path / name for name in ("whole", "plain", "parts"))
    asked = [*ASKED, EVERY]
    pool.run(live, [job(ASKED, plain, 8)], world_size=4)
    pool.run(at_speeds, [with_lists(job(asked, whole, 8))], world_size=4)
    expected, found = rows(plain), rows(whole)
    assert len(expected) == len(found) == 11
    for one, other in zip(expected, found, strict=True):
        for name in ("step", "data", "samples"):
            assert one.get(name) == other.get(name)
        for name in {"loss", "grad_norm", "eval_loss"} & {*one}:
            assert one[name] == pytest.approx(other[name], rel=1e-10)

    events = [e for e in read_events(whole / EVENTS_FILE) if e.kind == "balance"]
    shares = [(event.step, event.facts["samples"]) for event in events]
    assert shares == [(2, [6, 6]), (4, [3, 9]), (6, [8, 4])]
    last = Plan.from_json((whole / "plan.json").read_text())
    assert [pipeline.samples for pipeline in last.pipelines] == [8, 4]
    assert "pipelines take 8, 4 s a step: of each batch they now have 6, 6" in events[0].message
    # Borders are then far longer than what is computed, so that what there is room for helps.
    assert [event.message.count("made anew: 1f1b with") for event in events[::2]] == [1, 1]
    validate_plan(last, num_layers=last.num_layers, global_batch=12)
    assert last.pipelines[0].num_microbatches == 4

    waits = json.loads((whole / "summary.json").read_text())["waits"]
    assert [(each["rank"], each["pipeline"]) for each in waits] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert all("step totals" in each["waits_s"] for each in waits)

    both = [with_lists(job(asked, parts, steps)) for steps in (5, 8)]
    pool.run(at_speeds, both, world_size=4)
    losses_of = [[row["loss"] for row in rows(out) if "loss" in row] for out in (whole, parts)]
    assert losses_of[0] == losses_of[1], "shares were in force, so not one bit differs"
    again = [e for e in read_events(parts / EVENTS_FILE) if e.kind == "balance"]
    assert [(event.step, event.facts["samples"]) for event in again] == shares
    assert [event.facts["before"] for event in again] == [[8, 4], [6, 6], [3, 9]]


def test_the_plan_in_the_folder_can_be_asked_for(tmp_path: Path, pool: WorkerPool) -> None:
    """Parts of the head fit the tokenizer, which has other tokens than were asked for."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a few words of which no large vocabulary is made\n\n" * 400)
    words = ["data.tokenizer=bpe", f"data.path={text}", "train.steps=3", "data.vocab_size=600"]
    pipelines = "{share: 2, head: [1, 2], stages: [{layers: 1}, {}]}, {stages: [{}]}"
    asked = [*SMALL, "batch.samples=12", "batch.micro=2", *words]
    given = job([*asked, f"plan.pipelines=[{pipelines}]", EVERY], out, 3)
    given = replace(given, files={"plan.json": given.plan.to_json()})
    for steps in (3, 4):  # the second goes on with the shares that the first left
        pool.run(at_speeds, [replace(given, last_step=steps)], world_size=3)
        found = Plan.from_json((out / "plan.json").read_text())
        assert found == with_shares(given.plan, (4, 8))
    taken = f"plan.file={out / 'plan.json'}"
    again = resolve(load_config("debug", [*asked, taken]), Cluster(nodes=(LAPTOP,)), plan=found)
    assert again.plan == found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.shares=[1]"], "balance = 'a section': expected null. There is one pipeline"),
        (["plan.shares=[1,1]", "recovery.alarm=replan"], "expected off or warn with balance"),
        (["plan.shares=[1,1]", "balance.every=0"], "balance.every = 0"),
        (["plan.shares=[1,1]", "sites.every=2"], "expected null with sites"),
        (
            ["plan.pipelines=[{stages: [{layers: 1}, {}]}, {stages: [{}]}]", "plan.schedule=gpipe"],
            "expected null with the schedule gpipe",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(overrides: list[str], message: str) -> None:
    given = [*SMALL, "batch.samples=null", "batch.accumulation=2", "balance={}", *overrides]
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        resolve(load_config("debug", given), Cluster(nodes=(LAPTOP,)))
    assert message in str(refused.value)


def test_lists_beside_parts_of_the_head_stay() -> None:
    plan = plan_of(8, 8)
    first, other = plan.pipelines
    (whole,) = first.stages
    parts = tuple(replace(whole, layers=(2, 2), head_rows=rows) for rows in ((0, 3), (3, 5)))
    first = replace(first, stages=(whole, *parts), lists=("F B",))
    with pytest.raises(ConfigError, match="null with lists for parts of the head"):
        refuse_unbalanced(replace(plan, pipelines=(first, other)))
