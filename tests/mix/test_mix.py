"""Plans of parts and mixes, and the arithmetic of efficiency; without a lab."""

import re
from dataclasses import replace

import pytest

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError
from weft.lab.busy import Moment, busy
from weft.mix.measure import kinds_of, only
from weft.mix.mix import MixReport, Rates, in_rows, uncertainty
from weft.mix.page import page
from weft.mix.picture import timelines
from weft.mix.plans import (
    POOLED,
    Alone,
    Kind,
    Trial,
    Work,
    balanced_layers,
    fastest_shares,
    mix_trials,
    part_trials,
    tuned_again,
)
from weft.mix.reasons import reasons
from weft.models.registry import FAMILIES
from weft.planner.validate import validate_plan
from weft.virtual.cores import part

SPEC = FAMILIES["llama"].sizes["demo-5m"]
WORK = Work(spec=SPEC, seq_len=SPEC.seq_len, samples=28, precision="fp32")
CLUSTER = ClusterFile.model_validate(
    {
        "hosts": [
            {"name": "a", "chips": [{"kind": "big"}, {"kind": "small", "speed": 0.4}]},
            {"name": "b", "chips": [{"kind": "small", "speed": 0.4}]},
        ]
    }
)
BIG, SMALL = Kind("big", (0,)), Kind("small", (1, 2))


def rates(kind: Kind, *values: float) -> Rates:
    return Rates(part_trials(kind, WORK)[0], list(values), is_final=True)


def alone(kind: Kind, tokens_s: float) -> Alone:
    return Alone(part_trials(kind, WORK)[0].plan, tokens_s / SPEC.seq_len)


MEASURED = {"big": rates(BIG, 1000.0), "small": rates(SMALL, 800.0)}
ALONE = {"big": alone(BIG, 1000.0), "small": alone(SMALL, 800.0)}


def test_kinds_and_the_part_of_a_cluster_that_has_one() -> None:
    assert kinds_of(CLUSTER) == [BIG, SMALL]
    part = only(CLUSTER, SMALL)
    assert [(host.name, len(host.chips)) for host in part.hosts] == [("a", 1), ("b", 1)]
    assert part.links == CLUSTER.links
    with pytest.raises(ConfigError, match="at least two kinds"):
        kinds_of(part)


@pytest.mark.parametrize("samples", [28, 25, 3])
def test_every_trial_is_a_valid_plan_for_all_ranks(samples: int) -> None:
    work = replace(WORK, samples=samples)
    for kind in (BIG, SMALL):
        for trial in part_trials(kind, work):
            validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=samples)
            assert trial.plan.world_size == len(kind.ranks)
    alone = {kind.name: Alone(part_trials(kind, work)[0].plan, 4.0) for kind in (BIG, SMALL)}
    trials = mix_trials([BIG, SMALL], alone, work)
    assert len({trial.name for trial in trials}) == len(trials)
    for trial in trials:
        validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=samples)
        assert trial.plan.world_size == 3
    generations = {trial.name[0] for trial in trials}
    assert generations == {"u", "1", "2", "3"}
    assert {trial.generation for trial in trials} == {"pooled", "1", "2", "3"}


def test_shares_follow_measured_rates() -> None:
    by_speed = mix_trials([BIG, SMALL], ALONE, WORK)[1].plan
    assert [pipeline.samples for pipeline in by_speed.pipelines] == [16, 6, 6]
    pooled = mix_trials([BIG, SMALL], ALONE, WORK)[0]
    assert pooled.name == POOLED
    assert [p.stages[0].mesh.ranks for p in pooled.plan.pipelines] == [(0,), (1,), (2,)]
    slow = {**ALONE, "small": alone(SMALL, 1.0)}
    samples = [p.samples for p in mix_trials([BIG, SMALL], slow, WORK)[1].plan.pipelines]
    assert samples == [26, 1, 1]


def test_layers_are_cut_where_the_slowest_stage_is_fastest() -> None:
    headless = replace(SPEC, vocab_size=2, num_layers=14)
    assert balanced_layers([1.0, 0.4], headless, 256) == [10, 4]
    assert balanced_layers([0.4, 1.0, 1.4], headless, 256) == [2, 5, 7]
    with_head = balanced_layers([1.0, 1.0], SPEC, 256)
    assert with_head[0] > with_head[1]
    wide = replace(SPEC, vocab_size=1_000_000)
    assert balanced_layers([1.0, 1.0], wide, 256) == [SPEC.num_layers, 0]


def test_the_last_of_all_is_done_as_soon_as_can_be() -> None:
    """By trying every split of 20 samples over three chips."""
    speeds = (1.0, 0.38, 0.23)
    splits = [(a, b, 20 - a - b) for a in range(1, 19) for b in range(1, 20 - a)]

    def end(split: tuple[int, ...]) -> float:
        return max(share / speed for share, speed in zip(split, speeds, strict=True))

    found = fastest_shares(20, speeds)
    assert sum(found) == 20
    assert end(tuple(found)) == min(end(split) for split in splits)
    assert fastest_shares(3, [1.0, 1e-9, 1e-9]) == [1, 1, 1]


def first(trials: list[Trial], generation: str) -> Trial:
    return next(trial for trial in trials if trial.generation == generation)


def test_shares_follow_the_time_that_each_was_busy() -> None:
    """Rank 0 was done early: what it has more than the others costs it nothing."""
    trial = first(mix_trials([BIG, SMALL], ALONE, WORK), "1")
    assert [p.samples for p in trial.plan.pipelines] == [16, 6, 6]
    (again,) = tuned_again(trial, [BIG, SMALL], [1.6, 0.9, 0.9], WORK)
    assert [p.samples for p in again.plan.pipelines] == [12, 8, 8]
    assert again.name == f"{trial.name}, again"
    assert tuned_again(trial, [BIG, SMALL], [1.5, 1.5, 1.5], WORK) == []


def test_layers_follow_the_time_that_each_was_busy() -> None:
    trial = first(mix_trials([BIG, SMALL], ALONE, WORK), "3")
    held = [stage.layers for _, _, stage in trial.plan.stages()]
    again, slower = tuned_again(trial, [BIG, SMALL], [4.0, 0.5, 0.5], WORK)
    assert slower.instead_of == again.name and slower.plan.pipelines[0].schedule == "1f1b"
    assert next(stage.layers for _, _, stage in again.plan.stages()) < held[0]


def test_ranks_that_were_as_fast_as_expected_change_nothing() -> None:
    """Each of the two small chips does half of what its stage does."""
    trial = first(mix_trials([BIG, SMALL], ALONE, WORK), "3")
    (big, _), (small, _) = ((s.layers[1] - s.layers[0], s) for _, _, s in trial.plan.stages())
    spec, seq_len = WORK.spec, WORK.seq_len
    ends = (
        part(spec, seq_len, big, embeds=True, predicts=False) / 1000,
        part(spec, seq_len, small, embeds=False, predicts=True) / 800,
    )
    assert tuned_again(trial, [BIG, SMALL], [ends[0], ends[1], ends[1]], WORK) == []


def test_only_the_kind_that_needs_it_recomputes_first() -> None:
    tight = {**ALONE, "small": Alone(part_trials(SMALL, WORK)[1].plan, 3.0)}
    trials = [t for t in mix_trials([BIG, SMALL], tight, WORK) if t.generation == "1"][:3]
    again = [
        [s.mesh.ranks[0] for _, _, s in t.plan.stages() if s.recompute == "full"] for t in trials
    ]
    assert again == [[], [1, 2], [0, 1, 2]]
    assert [t.instead_of for t in trials] == ["", trials[0].name, trials[1].name]
    assert trials[1].name.endswith("recompute on rank 1, 2")


def test_pipelines_save_memory_by_their_schedule_first() -> None:
    trials = [t for t in mix_trials([BIG, SMALL], ALONE, WORK) if t.generation == "2"][:3]
    found = [
        (t.plan.pipelines[0].schedule, {s.recompute for _, _, s in t.plan.stages()}) for t in trials
    ]
    assert found == [("zb-h1", {"off"}), ("1f1b", {"off"}), ("1f1b", {"full"})]
    assert trials[1].name.endswith("micro 2, 1F1B")
    (again,) = tuned_again(trials[1], [BIG, SMALL], [4.0, 0.5, 0.5], WORK)
    assert again.plan.pipelines[0].schedule == "1f1b"


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


def test_why_a_mix_passes_the_sum_of_its_parts() -> None:
    off, full = part_trials(SMALL, WORK)[:2]
    tried = {
        "big": [Rates(off, [1000.0], memory_gib=0.75)],
        "small": [Rates(off, problem="rank 0 was killed"), Rates(full, [700.0])],
    }
    best = first(mix_trials([BIG, SMALL], ALONE, WORK), "2").plan
    (said, *_) = reasons(best, tried, {"big": 4.0, "small": 0.5}, [BIG, SMALL], WORK)
    needed = "as without that 768 MiB are needed and it has 512"
    assert said.startswith(f"small alone recomputes, {needed}; in the mix it holds ")
    same = {"big": [MEASURED["big"]], "small": [MEASURED["small"]]}
    assert reasons(best, same, {"big": None, "small": None}, [BIG, SMALL], WORK) == []
    again = Alone(full.plan, 700.0 / SPEC.seq_len)
    both = mix_trials([BIG, SMALL], {**ALONE, "small": again}, WORK)
    pooled = first(both, "pooled").plan
    assert reasons(pooled, tried, {"big": 4.0, "small": 0.5}, [BIG, SMALL], WORK) == []
    wide = replace(best, pipelines=(replace(best.pipelines[0], microbatch=4),))
    assert reasons(wide, same, {}, [BIG], WORK) == [
        "big has microbatches of 2 alone and of 4 in the mix"
    ]


def test_recomputing_is_only_for_what_does_not_fit() -> None:
    for trial in part_trials(SMALL, WORK):
        stages = [stage for _, _, stage in trial.plan.stages()]
        saves = trial.name.endswith("recompute")
        assert {stage.recompute for stage in stages} == {"full" if saves else "off"}
        assert bool(trial.instead_of) == (saves or trial.name.endswith("1F1B"))


def test_efficiency_and_where_it_comes_from() -> None:
    parts = {"big": rates(BIG, 990.0, 1000.0, 1010.0), "small": rates(SMALL, 500.0)}
    pooled, best, failed = (Rates(t) for t in mix_trials([BIG, SMALL], ALONE, WORK)[:3])
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


def test_timelines_of_balanced_plans_use_every_chip() -> None:
    rates_of = {0: 1000.0, 1: 400.0, 2: 400.0}
    for trial in mix_trials([BIG, SMALL], ALONE, WORK):
        lines = timelines(trial.plan, rates_of, WORK)
        tokens = 28 * SPEC.seq_len
        rate = tokens / max(line.step_s for line in lines)
        assert 0.5 * 1800 < rate <= 1800 * (1 + 1e-9), trial.name
    whole = part_trials(BIG, WORK)[0].plan
    (line,) = timelines(whole, {0: 1000.0}, WORK)
    assert line.step_s == pytest.approx(28 * SPEC.seq_len / 1000)


def test_the_page_shows_every_trial_and_a_step_of_each_generation() -> None:
    trials = mix_trials([BIG, SMALL], ALONE, WORK)
    mixes = [Rates(trial, [1300.0 + n], step_s=5.0) for n, trial in enumerate(trials)]
    mixes[-1].is_final = True
    report = MixReport(MEASURED, mixes)
    text = page(report, [BIG, SMALL], WORK)
    assert all(trial.name in text for trial in trials)
    fastest = {rates.trial.generation: rates.trial.plan for rates in mixes}  # the last of each
    pictures = 1 + 2 + sum(len(plan.pipelines) for plan in fastest.values())
    assert len(fastest) == 4
    assert text.count("<svg") == pictures
    assert text.count("measured 5 s a step, drawn ") == 4
    assert text.count("rank 1 small: ") == 4, "alone it keeps its number; in 3 of 4 mixes"
    assert text.count("ranks 1, 2 small: ") == 1, "generation 3"
    assert f"Pooling &times; {1300 / 1000:.3f}" in text
    assert f"Re-planning &times; {mixes[-1].middle / 1300:.3f}" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_all_steps_on_a_page_have_one_scale() -> None:
    """The large chip alone does 28 samples in the time of 10/28 of them on both."""
    shared = first(mix_trials([BIG, SMALL], ALONE, WORK), "1")
    mixes = [Rates(shared, [1700.0]), Rates(replace(shared, generation="pooled"), [1700.0])]
    text = page(MixReport(MEASURED, mixes), [BIG, SMALL], WORK)
    widths = [int(width) for width in re.findall(r'" width="(\d+)" height', text)]
    samples = [28 / 1000, 14 / 400, 14 / 400, *[16 / 1000, 6 / 400, 6 / 400] * 2]
    assert widths == pytest.approx([max(widths) * s / max(samples) for s in samples], abs=1)


def test_plans_of_parts_that_do_not_run_together() -> None:
    pooled, best = (Rates(t) for t in mix_trials([BIG, SMALL], ALONE, WORK)[:2])
    pooled.problem, best.values = "rank 1 was killed", [1500.0]
    report = MixReport(MEASURED, [pooled, best])
    assert report.to_json()["pooling_gain"] is None
    assert "do not run side by side" in page(report, [BIG, SMALL], WORK)


def test_tuning_runs_do_not_beat_what_was_repeated() -> None:
    trials = mix_trials([BIG, SMALL], ALONE, WORK)
    lucky, pooled = Rates(trials[1], [2000.0]), Rates(trials[0], [1500.0], is_final=True)
    report = MixReport(MEASURED, [lucky, pooled])
    assert report.best is pooled
    assert [rates.trial.generation for rates in report.best_of_generations()] == ["pooled", "1"]
    assert [row["note"] for row in in_rows(report)] == [*["1 repeat"] * 3, "tuning run"]
