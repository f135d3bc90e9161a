"""What a bench says of what it measured: efficiency, where it comes from, the page. No lab."""

import re
from dataclasses import replace
from functools import cache

import pytest
from mix.mix_cases import BIG, KINDS, SMALL, WORK, answers, chips_of, part_trial

from weft.lab.steps import Moment, busy
from weft.mix.mix import MixReport, Rates, in_rows, reasons, uncertainty
from weft.mix.page import page
from weft.mix.questions import Question, Trial
from weft.plan.plan import Plan
from weft.simulate.play import Timeline

POOLED = Question("pooled", 2)


def answer(generation: str) -> Trial:
    """The planner's plan of one of the generations."""
    (found,) = (trial for trial in answers() if trial.generation == generation)
    return found


def drawn(trial: Trial, kind: str = "") -> tuple[Timeline, ...]:
    """As a bench has it drawn."""
    return chips_of(kind).time(trial.plan, WORK).timelines


def rates(kind: str, *values: float) -> Rates:
    trial = part_trial(kind)
    return Rates(trial, list(values), is_final=True, timelines=drawn(trial, kind))


def measured(trial: Trial, *values: float, **more: object) -> Rates:
    return Rates(trial, list(values), timelines=drawn(trial), **more)


@cache
def alone() -> dict[str, Rates]:
    """What each kind reached without the other."""
    return {"big": rates("big", 1000.0), "small": rates("small", 800.0)}


def test_busy_is_what_a_rank_uses_of_its_chip() -> None:
    moments = [
        Moment(0, 0.0, (0.0, 0.0)),
        Moment(1, 10.0, (9.0, 5.0)),
        Moment(3, 14.0, (13.0, 5.8)),
        Moment(4, 15.0, (13.5, 0.0)),
    ]
    assert busy(moments, (1.0, 0.4), after_step=1) == pytest.approx((1.0, 0.5))
    assert busy(moments, (1.0, 0.4), after_step=3) == ()


def test_uncertainty_is_a_half_interval_of_the_mean() -> None:
    """Three values 1 apart: their deviation is 1, and Student's factor for two degrees 4.30."""
    assert uncertainty([1.0, 2.0, 3.0]) == pytest.approx(4.30 / 3**0.5)
    assert uncertainty([1.0]) is None


def recomputing(plan: Plan) -> Plan:
    pipelines = (
        replace(line, stages=tuple(replace(stage, recompute="full") for stage in line.stages))
        for line in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


def test_why_a_mix_passes_the_sum_of_its_parts() -> None:
    off = part_trial("small")
    full = replace(off, plan=recomputing(off.plan))
    tried = {
        "big": [Rates(off, [1000.0], memory_gib=0.75)],
        "small": [Rates(off, problem="rank 0 was killed"), Rates(full, [700.0])],
    }
    best = answer("2").plan
    limits = {"big": 4.0, "small": 0.5}
    (said, *_) = reasons(best, tried, limits, [SMALL])
    needed = "as without that 768 MiB are needed and it has 512"
    assert said.startswith(f"small alone recomputes, {needed}; in the mix it holds ")
    tried["small"] = [Rates(full, [700.0], kept_gib=0.625)]
    (said, *_) = reasons(best, tried, limits, [SMALL])
    assert said.startswith("small alone recomputes, as without that 640 MiB are needed and it has")
    same = {"big": [alone()["big"]], "small": [alone()["small"]]}
    both = {"big": None, "small": None}
    assert [s for s in reasons(best, same, both, KINDS) if "recompute" in s] == []
    assert reasons(answer("pooled").plan, same, both, KINDS) == []
    (other,) = reasons(recomputing(answer("pooled").plan), same, both, [SMALL])
    assert other == "small recomputes in the mix and not alone"
    assert reasons(recomputing(answer("pooled").plan), tried, limits, [SMALL]) == []
    first, *rest = answer("pooled").plan.pipelines
    wide = replace(answer("pooled").plan, pipelines=(replace(first, microbatch=4), *rest))
    assert reasons(wide, same, {}, [BIG]) == [
        "big has micro-batches of 2 alone and of 4 in the mix"
    ]


def test_efficiency_and_where_it_comes_from() -> None:
    parts = {"big": rates("big", 990.0, 1000.0, 1010.0), "small": rates("small", 500.0)}
    pooled, best, failed = (Rates(t) for t in answers()[:3])
    pooled.values, best.values = [1200.0], [1400.0, 1425.0, 1500.0]
    best.is_final = pooled.is_final = True
    failed.problem = "rank 1 was killed"
    report = MixReport(parts, [pooled, best, failed])
    facts = report.to_json()
    assert (facts["lower"], facts["upper"], facts["mix"]) == (1000, 1500, 1425)
    assert facts["efficiency"] == pytest.approx(0.95)
    assert facts["pooling_gain"] == pytest.approx(1.2)
    assert facts["replanning_gain"] == pytest.approx(1425 / 1200)
    assert facts["repeats"] == 3
    assert facts["spread"] == pytest.approx(100 / 1425)
    assert facts["efficiencies"] == pytest.approx([1400 / 1490])
    assert [trial["problem"] for trial in facts["trials"]] == ["", "", "rank 1 was killed"]


def test_the_page_shows_every_trial_and_a_step_of_each_generation() -> None:
    mixes = [measured(trial, 1300.0 + n, step_s=5.0) for n, trial in enumerate(answers())]
    mixes[-1].is_final = True
    report = MixReport(alone(), mixes)
    text = page(report, KINDS)
    assert all(trial.name in text for trial in answers())
    assert len(answers()) == 4
    assert text.count('<div class="rows">') == 1 + 2 + 4, "rates, parts, generations"
    assert text.count("measured 5 s a step, drawn ") == 4
    assert text.count("ranks 1, 2 small: ") == 3, "alone, pooled, and a mesh for each kind"
    assert text.count("rank 1 small: ") == 2, "with samples of its own, and in the pipeline"
    assert f"Pooling &times; {1300 / 1000:.3f}" in text
    assert f"Re-planning &times; {mixes[-1].middle / 1300:.3f}" in text
    assert "http" not in text.replace("http-equiv", "")


def test_all_steps_on_a_page_have_one_scale() -> None:
    shared = answer("1")
    mixes = [measured(shared, 1700.0), measured(replace(shared, question=POOLED), 1700.0)]
    text = page(MixReport(alone(), mixes), KINDS)
    _, _, *charts = text.split('<div class="rows">')
    bars = re.compile(r'class="bar [^>]* x="([\d.e-]+)%" width="([\d.e-]+)%"')
    ends = [max(float(x) + float(w) for x, w in bars.findall(chart)) for chart in charts]
    everything = [alone()["big"], alone()["small"], *mixes[-1:]]
    steps = [max(line.step_s for line in rates.timelines) for rates in everything]
    assert len(set(steps)) > 2
    assert ends[:2] == pytest.approx([100 * s / max(steps) for s in steps[:2]], abs=0.1)
    assert ends[2:] == pytest.approx([100 * steps[2] / max(steps)] * 2, abs=0.1)


def test_plans_of_parts_that_do_not_run_together() -> None:
    pooled, best = (measured(t) for t in answers()[:2])
    pooled.problem, best.values = "rank 1 was killed", [1500.0]
    report = MixReport(alone(), [pooled, best])
    assert report.to_json()["pooling_gain"] is None
    assert "do not run side by side" in page(report, KINDS)


def test_tuning_runs_do_not_beat_what_was_repeated() -> None:
    lucky, pooled = Rates(answers()[1], [2000.0]), Rates(answers()[0], [1500.0], is_final=True)
    report = MixReport(alone(), [lucky, pooled])
    assert report.best is pooled
    assert [row["note"] for row in in_rows(report)] == [*["1 repeat"] * 3, "tuning run"]
