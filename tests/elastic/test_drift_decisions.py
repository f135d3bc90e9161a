"""When a job goes on under another plan because ranks are slower or faster than was predicted."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import pytest
from resolve import profiles

from weft.cluster.cluster import Cluster, Node
from weft.config.load import load_config
from weft.elastic import replan
from weft.elastic.drift import HOUR_S, MOST_AN_HOUR, Drift, FirstOf, Measured, in_words, saving
from weft.elastic.failure import Epoch
from weft.elastic.replan import Replans
from weft.report.events import EVENTS_FILE, read_events
from weft.resolve.paced import Better
from weft.resolve.prediction import predict_run
from weft.resolve.resolve import resolve
from weft.train.job import Job
from weft.train.run_folder import PACES_FILE

ASKED = ["batch.samples=16", "batch.micro=1", "data.seq_len=64", "compute.precision=fp32"]
LAST = 100_000


@pytest.fixture
def replans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replans:
    """Two ranks with half of the samples each, on cores that somebody has measured."""
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path / "profiles"))
    node: Node = profiles.node()
    profiles.save(tmp_path / "profiles", node)
    flat = resolve(load_config("debug", [*ASKED, "plan.shares=[8,8]"]), Cluster(nodes=(node,)))
    loaded = load_config("debug", [*ASKED, "plan={auto: {max_stages: 1}}"])
    now = resolve(loaded, Cluster(nodes=(node,)), plan=flat.plan)
    prediction = predict_run(now)
    job = Job(
        config=now.config,
        plan=now.plan,
        out=tmp_path,
        last_step=LAST,
        threads=1,
        prediction=prediction,
    )
    return Replans(loaded, now, job)


class Clock:
    """Goes when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def drift(replans: Replans, told: list[str], clock: Clock) -> Iterator[Drift]:
    with Drift(replans, told.append, clock) as drift:
        yield drift


def reach(out: Path, step: int) -> None:
    (out / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')


def measure(replans: Replans, *paces: float, step: int = 10) -> None:
    """As rank 0 does."""
    assert replans.job.prediction is not None
    found = [step, replans.job.prediction.busy_s, paces]
    (replans.job.out / PACES_FILE).write_text(json.dumps(found))


def settled(drift: Drift, told: Sequence[str], *, says: int = 1) -> bool:
    """Whether ranks are wanted once the planner has said something."""
    before = len(told)
    while not (found := drift.wanted()) and len(told) < before + says:
        time.sleep(0.01)
    return found


def shares(epoch: Epoch) -> list[int]:
    """Samples of each rank."""
    parts = (p.stages[0].mesh.ranks for p in epoch.args[0].plan.pipelines)
    both = zip(parts, epoch.args[0].plan.pipelines, strict=True)
    return [each.samples // len(ranks) for ranks, each in both for _ in ranks]


def test_a_slow_rank_gets_less_once_and_its_part_back(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str]
) -> None:
    assert not drift.wanted()
    reach(tmp_path, 10)
    measure(replans, 1.0, 3.0)
    assert settled(drift, told)
    assert drift.wanted(), "until the ranks have come"
    assert not (tmp_path / PACES_FILE).exists()
    reach(tmp_path, 12)
    epoch = drift.epoch()
    assert shares(epoch) == [12, 4]
    assert (epoch.world_size, epoch.seats) == (2, (0, 1)), "the same processes"
    assert replans.job.plan.global_batch == 16
    (said,) = told
    assert said == (
        "after step 12: rank 1 3 times as long at work as the plan says, beside the others: the "
        "plan is now 2 ranks: 1 + 1, with 12 + 4 samples instead of 8 + 8; a step is predicted to "
        "take 0.328 s instead of 0.652 s"
    )
    (event,) = read_events(tmp_path / EVENTS_FILE)
    assert (event.kind, event.step, event.facts["paces"]) == ("replan", 12, [1.0, 3.0])
    assert not drift.wanted(), "once"
    prediction = replans.job.prediction
    assert prediction is not None
    assert prediction.busy_s[0] == pytest.approx(prediction.busy_s[1], rel=0.05)

    measure(replans, 1.0, 1 / 3)  # of what is now expected of it
    assert settled(drift, told)
    assert shares(drift.epoch()) == [8, 8]
    assert len(told) == 2
    assert "rank 1 0.333 times as long at work as the plan says" in told[1]


def test_what_was_measured_under_the_plan_before_is_forgotten(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str]
) -> None:
    """It came while the planner thought about the measure before it."""
    reach(tmp_path, 10)
    measure(replans, 1.0, 3.0)
    drift.wanted()
    measure(replans, 1.0, 5.0)
    assert settled(drift, told)
    assert shares(drift.epoch()) == [12, 4]
    assert not drift.wanted()
    while any(thread.name == "planner" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert not drift.wanted(), "nobody has measured this plan"
    assert len(told) == 1


def test_where_little_is_saved_the_plan_stays(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str]
) -> None:
    reach(tmp_path, 10)
    measure(replans, 1.0, 1.02)
    assert not settled(drift, told)
    reach(tmp_path, LAST - 1)  # the job would move for one step
    measure(replans, 1.0, 3.0)
    assert not settled(drift, told)
    assert replans.job.plan.pipelines[0].samples == 8
    assert "the plan stays, for there is no better one: the best one takes " in told[0]
    assert told[1].endswith("which saves less than 5% of 1 steps once the job has moved")
    kinds = [(e.kind, e.step) for e in read_events(tmp_path / EVENTS_FILE)]
    assert kinds == [("replan", 10), ("replan", 10)]


def test_moving_has_to_pay(replans: Replans) -> None:
    better = replans.better((1.0, 3.0))
    better = replace(better, now_s=1.0, step_s=0.5)
    assert saving(better, 100, 10.0) == pytest.approx(0.4)
    assert saving(better, 20, 10.0) == pytest.approx(0.0)
    assert saving(better, 0, 10.0) < 0


def test_what_took_longer_than_expected_is_expected_to(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str], clock: Clock
) -> None:
    """The first move takes so long that another one cannot pay."""
    reach(tmp_path, 10)
    measure(replans, 1.0, 3.0)
    assert settled(drift, told)
    drift.epoch()
    clock.now = 1e7
    reach(tmp_path, 11)
    measure(replans, 3.0, 1.0)
    assert not settled(drift, told)
    assert "the plan stays" in told[-1]


def test_the_planner_is_asked_a_few_times_an_hour(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str], clock: Clock
) -> None:
    """What is measured beyond that waits, and the newest counts."""
    reach(tmp_path, 10)
    for _ in range(MOST_AN_HOUR):
        measure(replans, 1.0, 1.0)
        settled(drift, told)
    assert len(told) == MOST_AN_HOUR
    measure(replans, 5.0, 1.0)
    assert not drift.wanted()
    measure(replans, 1.0, 3.0)
    assert not drift.wanted()
    clock.now = HOUR_S
    assert settled(drift, told)
    assert shares(drift.epoch()) == [12, 4]


def test_what_is_not_of_the_job_as_it_is_is_left(
    tmp_path: Path, replans: Replans, drift: Drift, told: list[str]
) -> None:
    """Ranks were lost, or somebody asked for another plan, before the planner was or after."""
    reach(tmp_path, 10)
    for text in ("{", "[1]", "[1, [0.5], 3]", "[1, [0.5, 0.5], [1, 3]]"):
        (tmp_path / PACES_FILE).write_text(text)
        assert not drift.wanted()
        assert not (tmp_path / PACES_FILE).exists()
    measure(replans, 1.0, 3.0)
    assert settled(drift, told)
    replans.under(replans.job.plan)
    assert not drift.wanted()
    epoch = drift.epoch()
    assert (epoch.args, epoch.seats) == ((replans.job,), None)
    assert told == []


def test_a_planner_that_fails_ends_nothing(
    tmp_path: Path,
    replans: Replans,
    drift: Drift,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> Better:
        raise ZeroDivisionError("by a rate")

    monkeypatch.setattr(replan, "better_plan", fails)
    reach(tmp_path, 10)
    measure(replans, 1.0, 3.0)
    assert not settled(drift, told)
    assert told[0].endswith("the plan stays, for there is no better one: by a rate")


def test_who_is_off_in_words() -> None:
    def words(*paces: float) -> str:
        return in_words(Measured(1, paces, paces, median_low(paces)))

    end = "as long at work as the plan says, beside the others"
    assert words(2.0, 2.1) == "no rank is slower than the others for its plan any more"
    assert words(2.0, 6.0) == f"rank 1 3 times {end}"
    assert words(0.5, 1.05, 3.0) == f"rank 0 0.476 times, rank 2 2.86 times {end}"
    assert in_words(Measured(1, (), (0.8, 0.3))) == (
        "rank 0 0.8 times, rank 1 0.3 times as long at work as the plan says"
    )
    assert words(*[2.0] * 4, *[1.0] * 5, 0.1) == (
        f"rank 0 2 times, rank 1 2 times, rank 2 2 times, rank 9 0.1 times and 1 others {end}"
    )


class Wish:
    def __init__(self, name: str) -> None:
        self.name, self.looks, self.is_on = name, 0, False

    def wanted(self) -> bool:
        self.looks += 1
        return self.is_on

    def epoch(self) -> Epoch:
        return Epoch((self.name,), 1)


def test_of_several_who_want_the_ranks_the_first_is_served() -> None:
    one, other = Wish("one"), Wish("other")
    both = FirstOf([one, other])
    assert not both.wanted()
    other.is_on = True
    assert both.wanted()
    assert both.epoch().args == ("other",)
    one.is_on = True
    assert both.wanted()
    assert both.epoch().args == ("one",)
    assert one.looks == other.looks == 3, "each has other things to look at"
