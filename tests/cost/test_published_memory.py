"""Memory of published runs: what software keeps, and what each program calls its memory."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.prediction_model import MEMORY, memory_of
from benchmarks.published import Run, attempt, run_of, shelf_of

GIB = 2**30
RECORD: dict[str, Any] = {
    "id": "m0",
    "model": "GPT",
    "n_layers": 8,
    "hidden": 1024,
    "n_heads": 8,
    "ffn_hidden": 4096,
    "vocab": 50_304,
    "seq_len": 1024,
    "gpu": "A100-SXM4-80GB",
    "n_gpus": 8,
    "pp": 1,
    "dp": 8,
    "mbs": 2,
    "gbs": 64,
    "recompute": "full",
    "dp_sharding": "zero1",
    "framework": "Megatron-DeepSpeed",
    "mem_unit": "GB (nvidia-smi, max over stages)",
}


def run_from(tmp_path, **changes: object) -> Run:
    run = attempt({**RECORD, **changes}, lambda record: run_of(record, GIB, shelf_of(tmp_path)))
    assert isinstance(run, Run), run
    return run


def without(run: Run, **changes: Any) -> float:
    """Bytes of the same run with another generation's traits."""
    return memory_of(replace(run, generation=replace(run.generation, **changes)), {})


def test_buckets_are_doubled_where_no_pipeline_is(tmp_path) -> None:
    """One of gradients and one of parameters, two bytes an element, of the rank's parameters."""
    alone, staged = run_from(tmp_path), run_from(tmp_path, pp=2, dp=4)
    params = alone.job.shape.params
    assert memory_of(alone, {}) - without(alone, flat_elements=0) == pytest.approx(8 * params)
    assert memory_of(staged, {}) - without(staged, flat_elements=0) == pytest.approx(2 * params)
    few = memory_of(alone, {}) - without(alone, flat_elements=params / 10)
    assert few == pytest.approx(8 * 0.9 * params)


@pytest.mark.parametrize(
    ("unit", "counted"),
    [
        ("GB (nvidia-smi, includes context)", "driver"),
        ("GiB (torch peak reserved/active, max over ranks)", "reserved"),
        ("GB (max over stages)", "allocated"),
        (None, "allocated"),
    ],
)
def test_what_memory_means_follows_from_its_unit(tmp_path, unit, counted) -> None:
    assert run_from(tmp_path, mem_unit=unit).counted == counted


def test_only_the_driver_counts_the_runtime_and_tensors_have_no_free_pieces(tmp_path) -> None:
    driver = run_from(tmp_path)
    reserved, allocated = (replace(driver, counted=how) for how in ("reserved", "allocated"))
    runtime = memory_of(driver, {}) - memory_of(reserved, {})
    assert runtime == pytest.approx(MEMORY["runtime_gib"][0] * GIB)
    assert memory_of(reserved, {}) > memory_of(allocated, {})


def test_free_pieces_go_when_the_chip_is_full(tmp_path) -> None:
    """The allocator gives them back before it fails; what is needed stays, whatever the chip."""
    run = replace(run_from(tmp_path), counted="reserved")
    tight = tuple(replace(chip, memory_gib=1.0) for chip in run.chips)
    needed = memory_of(replace(run, counted="allocated"), {})
    assert memory_of(replace(run, chips=tight), {}) == pytest.approx(needed)


def test_moments_of_a_byte_save_six_bytes(tmp_path) -> None:
    sharing = {"n_gpus": 1, "dp": 1, "gbs": 2}
    wide = run_from(tmp_path, **sharing)
    narrow = run_from(tmp_path, **sharing, notes="8-bit BNB optimizer")
    assert memory_of(wide, {}) - memory_of(narrow, {}) == pytest.approx(6 * wide.job.shape.params)


def test_adapters_keep_neither_gradients_nor_moments(tmp_path) -> None:
    whole = {"n_gpus": 1, "dp": 1, "framework": "NeMo", "dp_sharding": "none"}
    trained, frozen = run_from(tmp_path, **whole), run_from(tmp_path, **whole, model="GPT LoRA")
    saved = memory_of(trained, {}) - memory_of(frozen, {})
    assert saved == pytest.approx(16 * trained.job.shape.params)


def test_stages_keep_what_they_sent(tmp_path) -> None:
    """The first of two stages holds two microbatches' outputs; the allocator cuts 5 % more."""
    run = run_from(tmp_path, pp=2, dp=4, vocab=1000)
    output = 2 * 2 * 1024 * 1024
    kept = memory_of(run, {}) - without(run, keeps_outputs=False)
    assert kept == pytest.approx(2 * output * 1.05)
    alone = run_from(tmp_path)
    assert memory_of(alone, {}) == without(alone, keeps_outputs=False)


def test_a_gate_is_kept_twice_where_nothing_is_compiled(tmp_path) -> None:
    """Of half the layers with every second one recomputed, of none where all are."""
    eager = {"framework": "torchtitan fsdp", "gated_mlp": True, "recompute": "selective"}
    run = run_from(tmp_path, **eager)
    kept = memory_of(run, {}) - without(run, keeps_gate=False)
    assert kept == pytest.approx(4 * 2 * 2 * 1024 * 4096 * 1.05)
    run = run_from(tmp_path, **{**eager, "recompute": "full"})
    assert memory_of(run, {}) == without(run, keeps_gate=False)
