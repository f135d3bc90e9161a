"""What a step is predicted to send is what a real one sends, byte for byte but for padding."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.load import load_config
from weft.cost.sent import sent_by_plan
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.optim.registry import training_of
from weft.plan.model import ExpertsSpec, ModelSpec
from weft.plan.plan import Plan

PADDING = 0.01
"""Pieces of a bucket lie at aligned places; sums of norms over ``tp`` are left out."""
SHAPE = ["model.d_model=128", "model.d_ff=256", "model.d_head=32", "model.num_heads=4"]
BARE = ["data.workers=0", "sample.prompts=[]", "train.eval_samples=1", "metrics.report=false"]
"""Steps are all that is looked at."""
COUNTED = {
    "activations",
    "gradients",
    "parameters",
    "gather seq",
    "scatter seq",
    "vocab sums",
    "heads",
    "keys",
    "expert counts",
}


@pytest.mark.parametrize(
    "plan",
    [
        ["plan.stages=[{tp: 2}]", "compute.recompute=full"],
        ["plan.stages=[{dp: 2, zero: 3, layers: 2}, {tp: 2}]"],
        [
            "plan.stages=[{cp: 2, tp: 2, width_shares: [3, 1], zero: 3, layers: 2}, "
            "{cp: 4, scores: rows}]",
            "model.num_kv_heads=4",
        ],
        ["plan.stages=[{cp: 4, head_ways: 2, layers: 2}, {cp: 2, tp: 2, head_ways: 2}]"],
        ["plan.stages=[{dp: 2, zero: 2, passes: 2}]", "batch.micro=4"],
        ["plan.stages=[{dp: 2, zero: 3, passes: 2}]", "batch.micro=4"],
        ["plan.stages=[{tp: 2, layers: 1.5}, {dp: 2, zero: 3}]", "compute.recompute=full"],
        [
            "plan.pipelines=[{stages: [{tp: 2, zero: 1}]}, "
            "{stages: [{zero: 1, layers: 1}, {zero: 1}]}]"
        ],
        [
            "plan.stages=[{dp: 2, ep: 2, zero: 3, layers: 2, expert_cast: fp8}, {ep: 2, tp: 2}]",
            "batch.micro=4",
            "model.experts={count: 4, top_k: 2}",
        ],
        [
            "plan.stages=[{dp: 2, zero: 1, layers: 2}, {tp: 2}]",
            'optim.groups=[{params: "layers.0.*", trainable: false}]',
        ],
        [
            "plan.stages=[{dp: 2, zero: 1, layers: 2}, {tp: 2}]",
            "plan.head=[1, 2]",
            "model.vocab_size=2048",
        ],
    ],
    ids=[
        "tp",
        "unlike stages",
        "cp",
        "heads by cp",
        "passes",
        "level 3",
        "cut",
        "unlike pipelines",
        "experts",
        "frozen",
        "head",
    ],
)
def test_predicted_is_what_is_counted(plan: list[str], here: Path) -> None:
    arguments = ["train", "tiny.yaml", "--out", "mine", "--steps", "2", "--comm-report", "--quiet"]
    model = [*SHAPE, "model.num_kv_heads=4", "model.num_layers=3", "batch.samples=8"]
    assert run([*arguments, *BARE, *model, *plan]) == 0
    rows = 2048 if "model.vocab_size=2048" in plan else 257
    experts = ExpertsSpec(count=4, top_k=2) if "model.experts" in plan[-1] else None
    model_spec = replace(spec(), vocab_size=rows, experts=experts)
    record = json.loads((here / "mine/comm.json").read_text())
    counted: Counter[str] = Counter()
    for row in record["per_step"]:
        counted[{"vocab max": "vocab sums"}.get(row["name"], row["name"])] += row["bytes"]
    predicted: Counter[str] = Counter()
    ran = Plan.from_json((here / "mine/plan.json").read_text())
    one_node = ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=8)
    training = training_of(
        load_config(str(here / "mine/config.yaml")).config.optim, param_specs(model_spec)
    )
    view = ClusterView((one_node,))
    for way, num_bytes in sent_by_plan(
        ran, model_spec, view, seq_len=64, training=training
    ).items():
        assert way.reach == "node"
        predicted[way.name] += num_bytes
    slack = PADDING * sum(counted.values()) / 10
    for name in COUNTED:
        assert predicted[name] == pytest.approx(counted[name], rel=PADDING, abs=slack), name
    evenly = predicted["experts"]  # which a gate that has just begun almost does
    assert evenly == pytest.approx(counted["experts"], rel=0.15)
    assert (evenly > 0) == (experts is not None)


def spec() -> ModelSpec:
    """As the overrides say, with the vocabulary of bytes."""
    return replace(
        SIZES["debug-1m"],
        d_model=128,
        d_ff=256,
        d_head=32,
        num_heads=4,
        num_kv_heads=4,
        num_layers=3,
        vocab_size=257,
    )
