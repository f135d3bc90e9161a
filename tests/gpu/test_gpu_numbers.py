"""What a card computes, beside a processor: each for ``cuda``, and the same for ``cpu`` always.

What else needs a card lies beside its CPU twin: the kernel over packed documents and causal
attention (``tests/nn``), what a card says of itself and of memory it lacks (``tests/cluster``).
``python -m benchmarks.gpu`` asks more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import eight_bits
from benchmarks.gpu.correct import Table, mesh_plan, rehearsal, sharing, side_by_side
from benchmarks.gpu.memory import checkpoint
from benchmarks.gpu.part import DisprovedError, Found, Here
from weft.config.optim_sections import AdamWConfig
from weft.diagnose.verify import COARSE_EPS
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Precision

CARDS = torch.cuda.device_count()
DEVICES: Sequence[Any] = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(CARDS == 0, reason="no GPU that PyTorch can use"),
        ],
    ),
]
on_each = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found(tmp_path / "found.json")


@on_each
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_numbers_and_dropout_are_one_processors(
    device: str, precision: Precision, pool: WorkerPool, found: Found
) -> None:
    """The same elements are dropped, or nothing would agree. Recomputed, in passes."""
    asked = rehearsal("gpt2")
    assert asked.spec.dropout
    if precision in ("bf16", "fp16"):
        asked = replace(asked, optim=AdamWConfig(lr=0.01).rehearsed(COARSE_EPS))
    plan = mesh_plan(device, precision, recompute="full", passes=2)
    Table(found, pool).compare("alone", plan, asked)
    (gap,) = map(float, found.measured.values())
    assert gap > 0 or device == "cpu"


@pytest.fixture
def run_on_one_card() -> Iterator[Callable[..., Any]]:
    """Ranks that share the first card; their processes know no other one."""
    with WorkerPool() as apart:

        def run(device: str) -> Callable[..., list[Any]]:
            return lambda job, *args, world_size: apart.run(
                sharing, device, False, job, *args, world_size=world_size
            )

        yield run


@on_each
def test_two_ranks_share_a_card(
    device: str, pool: WorkerPool, found: Found, run_on_one_card: Callable[..., Any]
) -> None:
    """By host memory: a pipeline, and data parallelism that divides everything."""
    table = Table(found, pool, run_on_one_card(device))
    table.compare("two stages", mesh_plan((device, device)), rehearsal("llama"))
    table.compare("zero 3", mesh_plan(device, dp=2, zero=3), rehearsal("llama"))
    assert len(found.proved) == 2


@on_each
def test_cards_and_processors_in_one_job(device: str, pool: WorkerPool, found: Found) -> None:
    table = Table(found, pool)
    table.compare("tied", mesh_plan(("cpu", device)), rehearsal("llama", tied=True))
    table.compare("copies", side_by_side((device, "cpu"), (4, 2), 1), rehearsal("llama"))
    assert len(found.proved) == 2


@on_each
def test_checkpoints_go_there_and_back(device: str, found: Found, tmp_path: Path) -> None:
    """Bit-equal."""
    here = Here(device=device, folder=tmp_path, number=1)
    checkpoint(here, found)
    assert len(found.proved) == 2


@on_each
def test_products_in_eight_bits_are_what_is_emulated(
    device: str, tmp_path: Path, found: Found
) -> None:
    """And the emulation multiplies what was rounded to, and nothing else."""
    eight_bits.agrees(Here(device=device, folder=tmp_path, number=1), found)
    assert found.proved[0] == "the emulation multiplies what was rounded to"


def test_another_product_is_no_product_in_eight_bits(
    tmp_path: Path, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not rounded, for one, or one row twice."""

    def wrong(left: Any, right: Any, dtype: torch.dtype, **_: bool) -> torch.Tensor:
        made: torch.Tensor = left.exact(dtype) @ right.exact(dtype).T
        return made.roll(1, 0)

    monkeypatch.setattr(eight_bits, "product", wrong)
    with pytest.raises(DisprovedError, match="multiplies what was rounded to"):
        eight_bits.agrees(Here(device="cpu", folder=tmp_path, number=1), found)
