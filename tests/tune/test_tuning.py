"""A whole tuning in a lab that is made up: what it tries, ends with and writes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from limits import file_size_limit
from mix.test_bench import TWO_KINDS, FakeLab

from weft.config.load import load_config
from weft.platform.detect import detect
from weft.tune.job import Job, job_of
from weft.tune.page import as_json, page, verdict
from weft.tune.record import Record
from weft.tune.trials import Best, Trials
from weft.tune.tuner import Outcome
from weft.tune.tuning import BEST_PLAN, ROOM_BYTES, Limits, Result, Tuning

pytestmark = pytest.mark.usefixtures("refining_few")

ASKED = ["plan=auto", "batch.samples=70", "tune.micros=[2]", "train.steps=1000000"]
OWN = ["plan.shares=[1,1]", "batch.samples=70", "batch.micro=5", "tune.micros=[2]"]


def asked(pairs: list[str]) -> Job:
    return job_of(load_config("debug", pairs), "debug", pairs, TWO_KINDS, detect())


def tuned(
    job: Job, out: Path, monkeypatch: pytest.MonkeyPatch, lab: FakeLab, trials: int | None = None
) -> tuple[Result, list[str], list[Result]]:
    monkeypatch.setattr("weft.mix.turns.HeldJob", lab.job)
    said, shown = list[str](), list[Result]()
    out.mkdir(exist_ok=True)
    record = Record.opened(out, job.asked)
    limits = Limits(minutes=60.0, trials=trials)
    return Tuning(job, record, limits, said.append, shown.append).run(), said, shown


def takes_s(lab: FakeLab, result: Result, number: int) -> float:
    return max(lab._busy_s(result.tuner.candidates[number].plan, [1.0, 0.4]))


def test_the_best_of_all_is_found_by_few_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are known, so that the best of all plans is; none of an equal share comes near. The
    machine has no profile, so that more than half of all plans are worth a trial."""
    job, lab = asked(OWN), FakeLab()
    result, _, shown = tuned(job, tmp_path / "out", monkeypatch, lab)
    everything = [takes_s(lab, result, n) for n in range(len(result.tuner.candidates))]
    assert takes_s(lab, result, result.best) <= 1.02 * min(everything)
    outcomes = result.tuner.outcomes
    assert len(outcomes) <= 0.6 * len(everything)
    assert outcomes[0].candidate == 0 and result.tuner.candidates[0].is_given
    assert result.gain is not None
    assert result.gain.times == pytest.approx(everything[0] / everything[result.best], rel=0.01)
    assert "your own plan takes" in verdict(result)
    assert len(shown) == len(outcomes) + 1 and shown[-1].why == result.why
    assert json.loads(json.dumps(as_json(result)))["gain"] == result.gain.times
    assert page(result).count("<polyline") + page(result).count("<path") >= 2
    kept = tmp_path / "out" / BEST_PLAN
    kept.write_text("{}")  # ended before it was written
    again, more, _ = tuned(job, tmp_path / "out", monkeypatch, FakeLab(kills="nothing runs"))
    assert (again.best, again.why) == (result.best, result.why)
    assert not any("trial" in line for line in more), "it had ended"
    assert kept.read_text() == result.tuner.candidates[result.best].plan.to_json()


def test_trials_have_checkpoints_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the job itself saved elsewhere is neither gone on from nor added to."""
    lab, places = FakeLab(), set[str | None]()
    usual = lab.job

    def job(cluster, command, out, number):
        words = [word for word in command if "=" in word]
        places.add(load_config("debug", words).config.checkpoint.to)
        return usual(cluster, command, out, number)

    lab.job = job
    pairs = [*OWN, f"checkpoint.to={tmp_path / 'saved'}"]
    tuned(asked(pairs), tmp_path / "out", monkeypatch, lab, trials=1)
    assert places == {None}


@pytest.mark.parametrize("dies", ["the best", "the other", "both"])
def test_what_dies_in_the_last_comparison_is_left_out(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, lab, last = asked(OWN), FakeLab(), list[str]()
    usual = Trials.final

    def final(self: Trials, several: Sequence[Best]) -> list[Outcome]:
        last.extend(each.candidate.name for each in several)
        for each in several[:1] if dies == "the best" else several[dies == "the other" :]:
            self._entry(each.number, each.candidate).job.is_short = True
        return usual(self, several)

    monkeypatch.setattr(Trials, "final", final)
    result, said, _ = tuned(job, tmp_path / "out", monkeypatch, lab, trials=2)
    assert len(last) == 2
    (found,) = result.final
    name = result.tuner.candidates[found.candidate].name
    assert name == last[dies == "the best"]
    out = [line for line in said if " is left out: " in line]
    assert len(out) == 1 + (dies == "both")
    assert (tmp_path / "out" / BEST_PLAN).is_file()
    assert verdict(result)


def test_a_trial_that_somebody_kills_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its plan, which may be the best."""
    job = asked(OWN)
    undisturbed, *_ = tuned(job, tmp_path / "one", monkeypatch, FakeLab(), 3)
    result, said, _ = tuned(job, tmp_path / "other", monkeypatch, FakeLab(killed=2), 3)
    assert [
        line for line in said if line.endswith("was ended by SIGKILL, out of memory; once more")
    ]
    assert result.best == undisturbed.best
    tried = [[(o.candidate, o.problem) for o in r.tuner.outcomes] for r in (result, undisturbed)]
    assert tried[0] == tried[1]


def test_a_trial_that_a_full_disk_ended_is_not_held_against_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried as soon as there is room."""
    job, out = asked(OWN), tmp_path / "out"
    undisturbed, *_ = tuned(job, tmp_path / "one", monkeypatch, FakeLab(), 1)
    with file_size_limit(ROOM_BYTES - 1), pytest.raises(OSError, match="File too large") as caught:
        tuned(job, out, monkeypatch, FakeLab(hangs=True), 1)
    assert caught.value.filename.startswith(str(out)), "where"
    result, *_ = tuned(job, out, monkeypatch, FakeLab(), 1)
    (tried,) = result.tuner.outcomes
    assert (tried.candidate, tried.problem) == (0, "") and result.best == undisturbed.best


def test_time_that_is_up_ends_questions_too() -> None:
    """After the first that has an answer."""
    asked_of = list[tuple[int, int]]()
    job = asked([*ASKED[:2], "tune.micros=[64, 2]", "train.steps=9"])

    def tell(done: int, of: int) -> None:
        asked_of.append((done, of))

    some = job.space.candidates(tell, lambda: True)
    ((done, of),) = asked_of
    assert some and done == 1 < of
    assert len(job.space.candidates()) > len(some)


def test_a_lab_without_memory_for_it_leads_to_what_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan that recomputes nothing on the small chip runs out; each is one trial at most."""
    lab = FakeLab()
    usual = lab.job

    def short(cluster, command, out, number):
        job = usual(cluster, command, out, number)
        stages = [s for _, _, s in lab.runs[-1].stages() if 1 in s.mesh.ranks]
        job.is_short = any(stage.recompute == "off" for stage in stages)
        return job

    lab.job = short
    pairs = [*ASKED, "tune.recompute=[off,full]", "tune.layouts=[one-stage]"]
    result, said, _ = tuned(asked(pairs), tmp_path / "out", monkeypatch, lab)
    ended = [o for o in result.tuner.outcomes if o.step_s is None]
    assert ended and all(o.short is not None for o in ended)
    best = result.tuner.candidates[result.best]
    assert {s.recompute for _, _, s in best.plan.stages() if 1 in s.mesh.ranks} == {"full"}
    assert any(line.endswith("out of memory") for line in said)
