"""Plans of parts and mixes, and the arithmetic of efficiency; without a lab."""

from dataclasses import replace

import pytest

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError
from weft.lab.measure import kinds_of, only
from weft.lab.mix import (
    POOLED,
    Kind,
    MixReport,
    Rates,
    Work,
    balanced_layers,
    mix_trials,
    part_trials,
)
from weft.lab.mix_picture import page, timelines
from weft.models.registry import FAMILIES
from weft.planner.validate import validate_plan

SPEC = FAMILIES["llama"].sizes["demo-5m"]
WORK = Work(spec=SPEC, samples=28, precision="fp32")
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
    return Rates(part_trials(kind, WORK)[0], list(values))


ALONE = {"big": rates(BIG, 1000.0), "small": rates(SMALL, 800.0)}


def test_kinds_and_the_part_of_a_cluster_that_has_one() -> None:
    assert kinds_of(CLUSTER) == [BIG, SMALL]
    part = only(CLUSTER, SMALL)
    assert [(host.name, len(host.chips)) for host in part.hosts] == [("a", 1), ("b", 1)]
    assert part.links == CLUSTER.links
    with pytest.raises(ConfigError, match="at least two kinds"):
        kinds_of(part)


def test_every_trial_is_a_valid_plan_for_all_ranks() -> None:
    for kind in (BIG, SMALL):
        for trial in part_trials(kind, WORK):
            validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=28)
            assert trial.plan.world_size == len(kind.ranks)
    trials = mix_trials([BIG, SMALL], ALONE, WORK)
    assert len({trial.name for trial in trials}) == len(trials)
    for trial in trials:
        validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=28)
        assert trial.plan.world_size == 3
    generations = {trial.name[0] for trial in trials}
    assert generations == {"u", "1", "2", "3"}


def test_shares_follow_measured_rates() -> None:
    by_speed = mix_trials([BIG, SMALL], ALONE, WORK)[1].plan
    assert [pipeline.samples for pipeline in by_speed.pipelines] == [16, 6, 6]
    pooled = mix_trials([BIG, SMALL], ALONE, WORK)[0]
    assert pooled.name == POOLED
    assert [p.stages[0].mesh.ranks for p in pooled.plan.pipelines] == [(0,), (1,), (2,)]
    slow = {**ALONE, "small": rates(SMALL, 1.0)}
    samples = [p.samples for p in mix_trials([BIG, SMALL], slow, WORK)[1].plan.pipelines]
    assert samples == [26, 1, 1]


def test_layers_are_cut_where_the_slowest_stage_is_fastest() -> None:
    headless = replace(SPEC, vocab_size=2, num_layers=14)
    assert balanced_layers([1.0, 0.4], headless) == [10, 4]
    assert balanced_layers([0.4, 1.0, 1.4], headless) == [2, 5, 7]
    with_head = balanced_layers([1.0, 1.0], SPEC)
    assert with_head[0] > with_head[1]


def test_recomputing_is_only_for_what_does_not_fit() -> None:
    for trial in part_trials(SMALL, WORK):
        stages = [stage for _, _, stage in trial.plan.stages()]
        assert {stage.recompute for stage in stages} == {"full" if trial.instead_of else "off"}
        assert bool(trial.instead_of) == trial.name.endswith("recompute")


def test_efficiency_and_where_it_comes_from() -> None:
    parts = {"big": rates(BIG, 990.0, 1000.0, 1010.0), "small": rates(SMALL, 500.0)}
    pooled, best, failed = (Rates(t) for t in mix_trials([BIG, SMALL], ALONE, WORK)[:3])
    pooled.values, best.values = [1200.0], [1400.0, 1425.0, 1500.0]
    failed.problem = "rank 1 was killed"
    report = MixReport(parts, [pooled, best, failed])
    facts = report.to_json()
    assert (facts["lower"], facts["upper"], facts["mix"]) == (1000, 1500, 1425)
    assert facts["efficiency"] == pytest.approx(0.95)
    assert facts["pooling_gain"] == pytest.approx(1.2)
    assert facts["replanning_gain"] == pytest.approx(1425 / 1200)
    assert facts["repeats"] == 3
    assert facts["spread"] == pytest.approx(100 / 1425)
    assert [trial["problem"] for trial in facts["trials"]] == ["", "", "rank 1 was killed"]


def test_timelines_of_balanced_plans_use_every_chip() -> None:
    rates_of = {0: 1000.0, 1: 400.0, 2: 400.0}
    for trial in mix_trials([BIG, SMALL], ALONE, WORK):
        lines = timelines(trial.plan, rates_of, SPEC)
        tokens = 28 * SPEC.seq_len
        rate = tokens / max(line.step_s for line in lines)
        assert 0.5 * 1800 < rate <= 1800 * (1 + 1e-9), trial.name
    alone = part_trials(BIG, WORK)[0].plan
    (line,) = timelines(alone, {0: 1000.0}, SPEC)
    assert line.step_s == pytest.approx(28 * SPEC.seq_len / 1000)


def test_the_page_shows_every_trial_and_two_kinds_of_timeline() -> None:
    trials = mix_trials([BIG, SMALL], ALONE, WORK)
    mixes = [Rates(trial, [1300.0 + n]) for n, trial in enumerate(trials)]
    text = page(MixReport(ALONE, mixes), [BIG, SMALL], SPEC)
    assert all(trial.name in text for trial in trials)
    assert text.count("<svg") == 1 + 2 + 3 + len(mixes[-1].trial.plan.pipelines)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
