"""Plans that others tried: read, laid over their cluster, compared with the planner's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prediction import measure
from benchmarks.prediction_model import time_of
from benchmarks.published_chips import UnknownRecordError, cluster_from, find_chip, shelf_of
from benchmarks.trials import Trial, by_cluster, fits, planned_seconds, read_trials

PLAN = {"tp": 1, "dp": 4, "pp": 3, "mbs": 1, "gbs": 16, "layer_partition": [0, 13, 17, 30]}
TRIAL: dict[str, Any] = {
    "id": "mix_1",
    "kind": "real_trial",
    "model": "GPT-2 24L h1024 seq1024 V52256",
    "cluster": "2x p3.8xlarge and 1x g4dn.12xlarge",
    "parallel": PLAN,
    "unit": "s",
    "value": 2.0,
}
ALIKE = 0.05
"""Between the closed form of a pipeline with norms on every rank, and the simulator without."""
SHELF = shelf_of(Path("nowhere"))


def write(folder: Path, *trials: dict[str, Any]) -> Path:
    (folder / "hetero.json").write_text(json.dumps(trials), "utf-8")
    return folder


def only(folder: Path) -> Trial:
    (trial,) = read_trials(folder)
    assert isinstance(trial, Trial), trial
    return trial


def test_a_mixed_trial_has_chips_by_position(tmp_path) -> None:
    trial = only(write(tmp_path, TRIAL))
    run = trial.run
    assert [chip.name for chip in run.chips] == ["V100-SXM2-16GB"] * 2 + ["T4"]
    assert [work.layers for work in run.job.works()] == [(0, 11), (11, 15), (15, 24)]
    assert [chip.network_gbit_s for chip in run.chips] == [2.5, 2.5, 12.5]
    stages = trial.plan.pipelines[0].stages
    assert [stage.layers for stage in stages] == [(0, 11), (11, 15), (15, 24)]
    assert [stage.mesh.ranks for stage in stages] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert (trial.spec.d_model, trial.spec.vocab_size, trial.plan.global_batch) == (1024, 52256, 16)


@pytest.mark.parametrize(
    ("words", "pools"),
    [
        ("4x g4dn.12xlarge = 16x T4 (AWS, ~50 Gb/s)", [("T4", 4, 4, 12.5)]),
        ("3 p3dn.24xlarge", [("V100-SXM2-32GB", 3, 8, 12.5)]),
        (
            "16 nodes A800-80G + 48 nodes A100-40G (file name)",
            [("A800-SXM4-80GB", 16, 8, None), ("A100-SXM4-40GB", 48, 8, None)],
        ),
        (
            "12 A100 and 8 V100-32GB",
            [("A100-SXM4-40GB", 3, 4, None), ("V100-SXM2-32GB", 1, 8, None)],
        ),
    ],
)
def test_clusters_in_words(words, pools) -> None:
    found = cluster_from(words, SHELF).pools
    assert [(p.chip.name, p.num_nodes, p.chips_per_node, p.network_gbit_s) for p in found] == pools


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("some machines", "cluster 'some machines' has no known machines"),
        ("2x p9.huge", "machine 'p9.huge' is not in the list of instances"),
    ],
)
def test_clusters_that_say_nothing(words, reason) -> None:
    with pytest.raises(UnknownRecordError, match=reason):
        cluster_from(words, SHELF)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("A100-40GB", "A100-SXM4-40GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("TPU v5p", "TPUv5p"),
        ("Titan RTX", "TitanRTX"),
    ],
)
def test_chips_go_by_the_start_of_their_names(words, name) -> None:
    assert find_chip(words, SHELF).name == name


def test_plans_in_words_and_other_units(tmp_path) -> None:
    words: dict[str, Any] = {"parallel": "TP2 PP3 mbs1 gbs16", "unit": "samples/s", "value": 4.0}
    words["source"] = "FlagOpen/FlagScale v0.2"
    run = only(write(tmp_path, {**TRIAL, **words})).run
    assert (run.job.tp, run.job.pp, run.job.dp, run.measured) == (2, 3, 2, 4.0)
    assert [work.num_layers for work in run.job.works()] == [8, 8, 8]
    assert (run.generation.name, run.job.fused_attention) == ("megatron-core", True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "config"}, "'config' is no plan that was run"),
        ({"parallel": None}, "no plan"),
        ({"model": "?"}, "no sizes of the model"),
        ({"parallel": {**PLAN, "dp": 99}}, "tp x pp x dp is 297, on 12 chips"),
        ({"parallel": {**PLAN, "tp": "x"}}, "tp = 'x' is no number"),
        ({"value": -1}, "value = -1 is no measure of speed"),
        ({"value": float("nan")}, "value = nan is no measure of speed"),
    ],
)
def test_what_a_trial_lacks_is_said(tmp_path, change, reason) -> None:
    assert list(read_trials(write(tmp_path, {**TRIAL, **change}))) == [("mix_1", reason)]


def test_failed_trials_tell_whether_memory_is_told_right(tmp_path) -> None:
    """A microbatch of 64 samples does not fit 16 GiB; one does."""
    small = {**TRIAL, "id": "mix_2", "parallel": {**PLAN, "gbs": 256}}
    large = {**small, "id": "mix_3", "parallel": {**PLAN, "gbs": 256, "mbs": 64}, "value": None}
    trials = [one for one in read_trials(write(tmp_path, small, large)) if isinstance(one, Trial)]
    assert [fits(trial, {}) for trial in trials] == [True, False]
    assert [trial.failed for trial in trials] == [False, True]
    rows = {row["name"]: row for row in measure(tmp_path, rounds=0, validate=False)}
    assert (rows["fits:mix"]["ours"], rows["fits:mix"]["records"]) == (1.0, 2)
    assert rows["step_time:mix"]["records"] == 1
    assert rows["planned:mix"]["ours"] <= 1.0


def test_jobs_on_unlike_clusters_are_apart(tmp_path) -> None:
    other = {**TRIAL, "id": "mix_2", "cluster": "3x p3.8xlarge"}
    trials = [one for one in read_trials(write(tmp_path, TRIAL, other)) if isinstance(one, Trial)]
    assert list(by_cluster(trials)) == ["mix", "mix#2"]
    slow, fast = (planned_seconds(trial, {}) for trial in trials)
    assert slow > fast


def test_a_trial_and_its_plan_take_the_same_time(tmp_path) -> None:
    """Chips, links and software of one; attention keeps its scores in memory in both."""
    trial = only(write(tmp_path, {**TRIAL, "cluster": "3x g4dn.12xlarge"}))
    as_run, as_plan = time_of(trial.run, {}), planned_seconds(trial, {})
    assert as_plan == pytest.approx(as_run, rel=ALIKE)
    fused = replace(trial, run=replace(trial.run, job=replace(trial.run.job, fused_attention=True)))
    assert planned_seconds(fused, {}) < as_plan * (1 - ALIKE)
