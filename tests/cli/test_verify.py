"""``weft verify`` turns red for mistakes that are made on purpose, in code that both of its runs
share too: one process is compared with a reference that is none of that code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.cli.main import run
from weft.comm.address import RankAddress
from weft.elastic.pool import Job, WorkerPool
from weft.models import decoder_family
from weft.models.registry import FAMILIES
from weft.nn import attention
from weft.nn.documents import Packed
from weft.optim.registry import OPTIMIZERS
from weft.parallel.pipeline.stage_border import StageBorder, Way
from weft.plan.model import ParamSpec

Plant = Callable[[pytest.MonkeyPatch], None]

ARGUMENTS = ["verify", "tiny.yaml", "model.num_layers=2", "compute.precision=auto"]
PIPELINE = ["plan.stages=[{},{}]", "batch.micro=6"]


def attention_backward(patch: pytest.MonkeyPatch) -> None:
    """A thousandth too much of the gradient of keys."""
    right = attention.causal_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        if k.requires_grad:
            k.register_hook(lambda grad: grad * 1.001)
        return right(q, k, v, packed)

    patch.setattr(attention, "causal_attention", wrong)


def _decay(patch: pytest.MonkeyPatch, changed: Callable[[ParamSpec], bool]) -> None:
    right = decoder_family._params

    def wrong(*args: Any) -> list[ParamSpec]:
        return [replace(p, decay=p.decay ^ changed(p)) for p in right(*args)]

    patch.setattr(decoder_family, "_params", wrong)


def embeddings_decay(patch: pytest.MonkeyPatch) -> None:
    """As if they were matrices that multiply."""
    _decay(patch, lambda param: param.name == "embed.weight")


def head_does_not_decay(patch: pytest.MonkeyPatch) -> None:
    """As if it were an embedding."""
    _decay(patch, lambda param: param.name == "head.weight")


def learning_rate_stays(patch: pytest.MonkeyPatch) -> None:
    """No schedule."""
    patch.setattr("weft.diagnose.verify.lr_at", lambda optim, *_: optim.lr)


def border_drops_gradients(patch: pytest.MonkeyPatch) -> None:
    """The stage before a border gets zeros back."""
    right = StageBorder.receive

    def wrong(self: StageBorder, way: Way, microbatch: int) -> dict[str, Tensor]:
        tree = right(self, way, microbatch)
        return tree if way == "F" else {n: torch.zeros_like(grad) for n, grad in tree.items()}

    patch.setattr(StageBorder, "receive", wrong)


def nothing_wrong(patch: pytest.MonkeyPatch) -> None:
    """The code as it is."""


def run_with(address: RankAddress, plant: Plant, job: Job, *args: Any) -> Any:
    """One rank, with a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return job(address, *args)


class PlantedPool:
    """The tests' ranks, each with the mistake."""

    def __init__(self, pool: WorkerPool, plant: Plant) -> None:
        self.pool, self.plant = pool, plant

    def __enter__(self) -> PlantedPool:
        return self

    def __exit__(self, *_: object) -> None:
        """The ranks stay for other tests."""

    def run(self, job: Job, *args: Any, world_size: int) -> list[Any]:
        return self.pool.run(run_with, self.plant, job, *args, world_size=world_size)


@pytest.fixture
def planted(here: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The exit code of ``weft verify`` where a mistake is everywhere, in this process too."""

    def verify(plant: Plant, *arguments: str) -> int:
        monkeypatch.setattr("weft.elastic.pool.WorkerPool", lambda: PlantedPool(pool, plant))
        plant(monkeypatch)
        return run([*ARGUMENTS, *arguments])

    return verify


Planted = Callable[..., int]


@pytest.mark.parametrize(
    ("plant", "plan", "right"),
    [
        (attention_backward, [], {"max_rel"}),
        (embeddings_decay, [], {"max_rel"}),
        (head_does_not_decay, [], {"max_rel"}),
        (learning_rate_stays, ["optim.schedule.kind=cosine"], {"max_rel"}),
        (border_drops_gradients, PIPELINE, {"reference"}),
        (attention_backward, PIPELINE, {"max_rel"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_red_for_a_mistake(
    plant: Plant,
    plan: list[str],
    right: set[str],
    planted: Planted,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``right``: the comparison that shows nothing, because both its sides make the mistake or
    neither does."""
    assert planted(plant, *plan, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    sides = {"max_rel": found["max_rel"], "reference": found["reference"]["max_rel"]}
    inside = {n for n, side in sides.items() if max(side.values()) <= found["tolerance"]}
    assert (found["ok"], inside) == (False, right), found


@pytest.mark.parametrize("plan", [[], PIPELINE], ids=["shares", "stages"])
def test_green_without_one(
    plan: list[str], planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted(nothing_wrong, *plan, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["reference"]["lacks"] == ""
    assert max(found["reference"]["max_rel"].values()) < found["tolerance"] == 1e-10


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_coarser_numbers_are_inside_their_tolerance(
    precision: str, planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted(nothing_wrong, f"compute.precision={precision}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == precision
    assert max(found["reference"]["max_rel"].values()) > 1e-10, "it is not the same code"


def test_matrices_that_are_narrow_are_updated_otherwise(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the reference too: not what else has such names."""
    group = "optim.groups=[{params: layers.*, narrower_than: 512, lr_scale: 0.5, weight_decay: 0}]"
    assert planted(nothing_wrong, group) == 0, capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted(nothing_wrong, "optim.lr=1e300", "optim.max_grad_norm=null", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["max_rel"]["param"] is None and found["ok"] is False


def test_a_small_model_of_which_nothing_is_trained_is_refused(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = ("layers.[0-3].*", "embed*", "head*", "norm*")
    groups = ", ".join(f"{{params: '{each}', trainable: false}}" for each in frozen)
    assert planted(nothing_wrong, "model.num_layers=6", f"optim.groups=[{groups}]") == 2
    told = capsys.readouterr().err
    assert "optim.groups" in told and "has 4 layers" in told and "compute.precision" not in told


def test_eight_bits_are_compared_with_one_process_alone(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all else in fp64: in bf16 roundings move some over the middle of two such numbers."""
    assert planted(nothing_wrong, "compute.precision=fp8", "plan.stages=[{tp: 2}]", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["tolerance"]) == ("fp8-fp64", 1e-10)
    assert found["reference"] == {"max_rel": None, "lacks": "it has no products in eight bits"}
    assert max(found["max_rel"].values()) < found["tolerance"]


@pytest.mark.parametrize("delayed", ["margin: 1", "history: 1"])
def test_scales_are_as_late_in_one_process(
    delayed: str, planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compute.precision=fp8-delayed", f"compute.delayed={{{delayed}}}", "--json"]
    assert planted(nothing_wrong, *words) == 0, capsys.readouterr().out


def test_experts_are_not_chosen_in_two_bytes(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    """By roundings a token would go to one or to another."""
    words = ["model.experts={count: 4, top_k: 2}", "compute.precision=bf16", "--json"]
    assert planted(nothing_wrong, *words) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "fp64"


def blocks_have_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.nn.recomputed.parts_of", lambda block: {})


def test_what_ranks_refuse_is_a_mistake_in_the_configuration(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted(blocks_have_no_parts, "compute.recompute=core") == 2
    told = capsys.readouterr().err
    assert "compute.recompute = 'core': expected one of off, full for such a model." in told
    assert "Traceback" not in told


def test_people_read_both_comparisons(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert planted(embeddings_decay) == 1
    lines = capsys.readouterr().out.splitlines()
    words = [line.split(" largest")[0].strip() for line in lines]
    compared = ["loss", "grad", "param", "grad_norm"]
    assert words == [
        "2 rank(s) against one process, 3 steps, fp64",
        *compared,
        "the plan changes nothing (tolerance 1e-10)",
        "one process against the reference (the model written out, PyTorch's optimizer)",
        *compared,
        "ONE PROCESS DIFFERS FROM IT (tolerance 1e-10)",
    ]


@pytest.mark.parametrize(
    ("registry", "name", "lacks"),
    [
        (FAMILIES, "llama", "the family llama gives no reference"),
        (OPTIMIZERS, "adamw", "the optimizer adamw gives no reference"),
    ],
    ids=["family", "optimizer"],
)
def test_without_a_reference_it_says_so(
    registry: Any,
    name: str,
    lacks: str,
    planted: Planted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plan is still compared; what both of its runs share is not seen then."""
    monkeypatch.setitem(registry._found, name, replace(registry[name], reference=None))
    assert planted(attention_backward, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reference"] == {"max_rel": None, "lacks": lacks}
    assert planted(nothing_wrong) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"one process is compared with no reference: {lacks}"
