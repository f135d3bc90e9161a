"""Published records: read, predicted, scored; on records made up here."""

import json
from dataclasses import replace
from typing import Any

import pytest
from cost.published_records import RECORD, write

from benchmarks.prediction import Scored, measure, read, show, spearman
from benchmarks.prediction_fit import fit, models, problem, worth_having
from benchmarks.prediction_model import SOFTWARE, names_for, time_of
from benchmarks.published import Run, read_memory, read_times
from benchmarks.software import FULL, generation_of
from weft.cost.work import StageWork


def only(found: Any) -> Run:
    (run,) = found
    assert isinstance(run, Run), run
    return run


def test_a_record_becomes_a_job(tmp_path) -> None:
    run = only(read_times(write(tmp_path, RECORD)))
    job = run.job
    assert (job.dp, job.tp, job.pp, job.chunks, job.zero, job.dtype) == (4, 2, 2, 4, 1, "fp8")
    assert (job.recompute, job.num_microbatches, run.measured) == (FULL, 16, 3.0)
    assert job.works()[1] == StageWork(
        layers=(16, 32),
        embeds=False,
        predicts=True,
        samples=1,
        seq_len=4096,
        axes=(("tp", 2),),
        recompute=FULL,
        dtype="fp8",
    )


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"samples_per_s": 16.0}, 4.0),
        ({"tokens_per_s_per_gpu": 4096.0}, 4.0),
        ({"tflops_per_gpu": 100.0, "flop_convention": "params_6N", "params_b": 7.0}, 6.881),
        ({"tflops_per_gpu": 100.0, "flop_convention": "model_causal_half", "params_b": 7.0}, 7.409),
    ],
)
def test_seconds_from_what_was_printed(tmp_path, measured, seconds) -> None:
    run = only(read_times(write(tmp_path, {**RECORD, "iter_time_s": None, **measured})))
    assert run.measured == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "Abacus 9"}, "chip 'Abacus 9' is not in the catalogue"),
        ({"iter_time_s": None}, "no measured time"),
        ({"tp": None, "pp": None, "dp": None}, "no tp, pp or dp"),
        ({"n_gpus": 8}, "tp x pp x cp x dp is 16, on 8 chips"),
        ({"hidden": None, "model": "?"}, "no hidden, and no size to tell it from"),
        ({"seq_len": None}, "no seq_len"),
        ({"moe": {"experts": 8}}, "no n_experts"),
        ({"moe": {"n_experts": 8, "topk": 2, "moe_ffn": "x"}}, "moe_ffn = 'x' is no number"),
        ({"moe": {"n_experts": 8, "mla": 3}}, "moe.mla = 3 describes no attention"),
        ({"tp": "two"}, "tp = 'two' is no number"),
        ({"n_layers": 1}, "1 layers in 2 positions"),
    ],
)
def test_what_a_record_lacks_is_said(tmp_path, change, reason) -> None:
    assert list(read_times(write(tmp_path, {**RECORD, **change}))) == [("r0", reason)]


def test_failed_runs_are_no_records(tmp_path) -> None:
    assert list(read_times(write(tmp_path, {**RECORD, "status": "OOM"}))) == []


def test_sizes_stand_in_for_layers(tmp_path) -> None:
    record = {**RECORD, "n_layers": None, "model": "GPT 52B", "hidden": 8192, "gated_mlp": False}
    assert only(read_times(write(tmp_path, record))).job.shape.num_layers == 64


@pytest.mark.parametrize(
    ("words", "slabs"),
    [
        ("none", ()),
        ("selective(core attention)", ()),
        ("full, block 4", ((("full",), 0.25),)),
        ("full uniform 1 layers", FULL),
        ("20 of 40 layers, mlp", ((("feed_forward",), 0.5),)),
        ("core_attn, moe_act, mla_up_proj", ((("attention", "activation"), 1.0),)),
        ("not stated (no ACT_CKPT in config)", ()),
    ],
)
def test_recomputed_parts_are_read_from_words(tmp_path, words, slabs) -> None:
    """Of stages of 16 layers, with fused attention."""
    run = only(read_times(write(tmp_path, {**RECORD, "recompute": words})))
    assert run.job.recompute == slabs


def test_offload_takes_time_and_sharing_alone_is_a_plan(tmp_path) -> None:
    whole = {"tp": None, "pp": None, "dp": None, "vpp": None, "dp_sharding": "fsdp"}
    records = [
        {**RECORD, **whole, "id": f"r{n}", "offload": o} for n, o in enumerate((None, "cpu"))
    ]
    here, away = (run for run in read_times(write(tmp_path, *records)) if isinstance(run, Run))
    assert (here.job.dp, here.job.zero, away.job.tier) == (16, 3, "host")
    assert time_of(away, {}) > time_of(here, {})


@pytest.mark.parametrize(("pp", "batch", "microbatch"), [(1, 64, 4), (1, 24, 2), (2, 64, 1)])
def test_an_unsaid_microbatch_is_large_where_no_pipeline_is(
    tmp_path, pp, batch, microbatch
) -> None:
    """Of 16, 6 and 16 samples a rank."""
    record = {**RECORD, "pp": pp, "vpp": None, "gbs": batch, "mbs": None}
    assert only(read_times(write(tmp_path, record))).job.microbatch == microbatch


def test_memory_of_a_twin_takes_its_group(tmp_path) -> None:
    peak = {**RECORD, "id": "mem_r0", "kind": "measured_peak", "mem_gib": 30.0, "group": None}
    peak |= {"throughput_id": "r0", "mem_unit": "GB (nvidia-smi)"}
    del peak["group"]
    write(write(tmp_path, RECORD), peak, name="memory.json")
    run = only(read_memory(tmp_path))
    assert (run.group, run.measured, run.first_alone) == ("g", 30 * 2**30, True)


ODD = (None, 0, -1, "", "two", "8", 1.5, float("nan"), [], {}, {"n_experts": 8}, True, 1e30)


@pytest.mark.parametrize("key", [*RECORD, "moe", "head_dim", "inter_gbps_per_gpu", "grad_accum"])
def test_no_odd_value_stops_the_rest(tmp_path, key) -> None:
    """A record is predicted, or named with what it lacks."""
    records = [{**RECORD, "id": f"r{n}", key: odd} for n, odd in enumerate(ODD)]
    write(tmp_path, *records, {**RECORD, "id": "right"}, "no record")
    runs = list(read_times(tmp_path))
    assert len(runs) == len(ODD) + 1 or key == "status"
    for run in runs:
        if isinstance(run, Run):
            assert 0 < time_of(run, {}) < float("inf"), run
    assert isinstance(runs[-1], Run)


def test_broken_files_cost_nothing_but_themselves(tmp_path) -> None:
    write(tmp_path, RECORD)
    (tmp_path / "memory.json").write_text("[{", "utf-8")
    (tmp_path / "hetero.json").write_text("{}", "utf-8")
    chips = [{"id": "Abacus 9", "mem_bw_gbs": "much"}, "no chip"]
    (tmp_path / "chips.json").write_text(json.dumps(chips), "utf-8")
    *_, unpredicted = measure(tmp_path, rounds=0, validate=False)
    names = [reason["record"] for reason in unpredicted["reasons"]]
    assert names == ["memory.json", "hetero.json"]


def test_names_that_are_no_names_stop_nobody(tmp_path) -> None:
    peak = {**RECORD, "kind": "measured_peak", "mem_gib": 30.0}
    records = [{**peak, "throughput_id": odd, "id": odd} for odd in ODD]
    write(write(tmp_path, *records), *records, name="memory.json")
    assert len(list(read_memory(tmp_path))) == len(ODD)


def test_a_chip_may_come_with_the_records(tmp_path) -> None:
    chip = {"id": "Abacus 9", "memory_gb": 80, "mem_bw_gbs": 3350, "bf16_tflops": 100}
    record = {**RECORD, "gpu": "Abacus 9", "precision": "bf16"}
    write(tmp_path, record, {**record, "id": "r1", "gpu": {**chip, "id": "A8", "bf16_tflops": 10}})
    (tmp_path / "chips.json").write_text(json.dumps([chip]), "utf-8")
    fast, slow = (run for run in read_times(tmp_path) if isinstance(run, Run))
    assert time_of(slow, {}) > 3 * time_of(fast, {})


def test_sixteen_v100_a_node_are_a_dgx2(tmp_path) -> None:
    record = {**RECORD, "gpu": "V100-SXM2-32GB", "precision": "fp16"}
    write(tmp_path, record, {**record, "id": "dgx2", "gpus_per_node": 16})
    usual, dgx2 = (run.chips[0] for run in read_times(tmp_path) if isinstance(run, Run))
    assert (usual.name, dgx2.name) == ("V100-SXM2-32GB", "V100-SXM3-32GB")
    assert dgx2.peak_flops("fp16") == pytest.approx(1.07 * usual.peak_flops("fp16"))


def test_rows_say_errors_ranks_and_what_is_missing(tmp_path, capsys) -> None:
    records = [
        {**RECORD, "id": f"r{n}", "gbs": 64 * n, "iter_time_s": 2.0 * n} for n in range(1, 5)
    ]
    write(tmp_path, *records, {**RECORD, "group": "h"}, {**RECORD, "id": "bad", "dp": 99})
    rows = {row["name"]: row for row in measure(tmp_path, rounds=0, validate=True)}
    assert rows["rank:g"]["ours"] == pytest.approx(1.0)
    assert rows["step_time:g"]["records"] == 4
    assert rows["step_time:all"]["records"] == 5
    assert "cross_validated:step_time:h" in rows
    assert rows["unpredicted"]["reasons"][0]["record"] == "bad"
    show(list(rows.values()))
    assert "not predicted: 1 records" in capsys.readouterr().out


def test_error_is_relative_to_what_was_measured(tmp_path) -> None:
    run = only(read_times(write(tmp_path, RECORD)))
    assert Scored(run=run, predicted=3.6).error == pytest.approx(0.2)


def test_fitting_moves_towards_the_records(tmp_path) -> None:
    runs = read(write(tmp_path, *({**RECORD, "id": f"r{n}"} for n in range(20)))).tasks[0].runs
    before = time_of(runs[0], {})
    fitted = fit(runs, time_of, {}, names_for(runs, memory=False), rounds=3)
    assert abs(time_of(runs[0], fitted) / 3 - 1) < 0.2 * abs(before / 3 - 1)


@pytest.mark.parametrize(
    ("words", "name", "fused"),
    [
        ("Megatron-LM 2019-09", "megatron-2020", False),
        ("Megatron-LM 2021-06", "megatron-2021", False),
        ("Megatron-LM 2022-05", "megatron-2022", False),
        ("Megatron-LM 2024-03", "megatron-core", True),
        ("GPT-NeoX 2022-02", "megatron-deepspeed", False),
        ("PyTorch FSDP2 2025", "torch-eager", True),
        ("metaseq 2022-05", "other", False),
        ("nanotron 2024", "other", True),
    ],
)
def test_software_is_told_by_its_name_and_year(words, name, fused) -> None:
    made = generation_of(words)
    assert (made.name, made.fused_attention) == (name, fused)


def test_software_is_known_by_what_it_does(tmp_path) -> None:
    """By no name of its own: what it does not share with others is a feature that costs time."""
    run = only(read_times(write(tmp_path, {**RECORD, "precision": "bf16"})))
    assert not {name for name in names_for([run], memory=False) if name.startswith("software.")} - {
        f"software.all.{field}" for field in SOFTWARE
    }

    def seconds(**features: Any) -> float:
        return time_of(replace(run, generation=replace(run.generation, **features)), {})

    compiled, fused, apart = (seconds(kernels=each) for each in ("compiled", "fused", "apart"))
    assert compiled < fused < apart
    library, second, first = (seconds(attention=a) for a in ("library", "flash2", "flash"))
    assert library < second < first
    assert seconds(hides_tensor=False) > seconds(hides_tensor=True)


def test_constants_that_help_nobody_are_dropped(tmp_path) -> None:
    """Times of two models as predicted with one constant changed: that one alone is kept."""
    shapes = [(16, 2048, "g"), (24, 2048, "g"), (32, 4096, "h"), (40, 5120, "h")]
    records = [
        {**RECORD, "id": f"r{n}", "group": group, "n_layers": layers, "hidden": hidden}
        for n, (layers, hidden, group) in enumerate(shapes)
    ]
    runs = read(write(tmp_path, *records)).tasks[0].runs
    truth = {"software.all.slowdown": 1.6}
    runs = [replace(run, measured=time_of(run, truth)) for run in runs]
    names = ["links.all.border", "software.all.slowdown", "software.all.launch_us"]
    kept = worth_having(runs, problem(runs, time_of, truth, names))
    assert kept == ["software.all.slowdown"]
    assert len(set(models(runs).tolist())) > 1


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, rel=1e-3)
