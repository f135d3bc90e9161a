"""What works with what, and what is refused and why: asked of the code, for `combinations.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.plan.plan import ScheduleName
from weft.resolve.resolve import Resolved, resolve
from weft.schedules.registry import SCHEDULES

GPU = catalogue()["H100-SXM5-80GB"]
GPUS = Cluster(
    nodes=(
        Node(
            host="box",
            cpu="some",
            cores=16,
            memory_gib=64,
            cpu_bf16=True,
            chips=(GPU,) * 8,
            problems=(),
        ),
    )
)
"""A machine on which no plan fails for lack of chips."""
BASE = ("batch.samples=24", "batch.micro=4", "compute.device=cpu", "compute.precision=fp32")
"""Beside the recipe `debug`, whose model has three layers and four heads."""


def resolved(overrides: Sequence[str], world_size: int | None = None) -> Resolved:
    """What `weft plan debug ...` would print on that machine."""
    return resolve(load_config("debug", [*BASE, *overrides]), GPUS, world_size=world_size)


@dataclass(frozen=True)
class Feature:
    """Something to combine with every schedule of two meshes."""

    name: str
    stages: str
    more: tuple[str, ...] = ()

    def works_with(self, schedule: ScheduleName) -> bool:
        stages = [f"plan.stages=[{self.stages}]", f"plan.schedule={schedule}"]
        if "pipelines" in self.stages:
            stages = [self.stages.replace("SCHEDULE", schedule)]
        try:
            resolved([*stages, *self.more])
        except ConfigErrors:
            return False
        return True


UNLIKE = "plan.pipelines=[{share: 2, stages: [{}, {}], schedule: SCHEDULE}, {stages: [{tp: 2}]}]"
ACROSS = (
    "plan.pipelines=[{{share: 2, stages: [{{zero: {0}}}, {{zero: {0}}}], schedule: SCHEDULE}}, "
)
ACROSS += "{{stages: [{{tp: 2, zero: {0}}}]}}]"
ELSEWHERE = (
    "{device: cuda, state_tier: host}, {dp: 2, zero: 2, state_tier: disk}",
    ("optim.state_folder=/scratch",),
)
FEATURES = (
    Feature("stages of unequal layers", "{layers: 3}, {}"),
    Feature("a border inside a layer", "{layers: 1.5}, {}"),
    Feature("data parallel, other sizes on either side", "{dp: 2}, {dp: 3}"),
    Feature("tensor and sequence parallel, other sizes on either side", "{tp: 2}, {tp: 4}"),
    Feature("context parallel, other sizes on either side", "{cp: 2}, {cp: 4, tp: 2}"),
    Feature(
        "the same, heads divided by some or all", "{cp: 2, head_ways: 2}, {cp: 4, head_ways: 2}"
    ),
    Feature(
        "the same, with rows of scores",
        "{cp: 2, scores: rows}, {cp: 4, head_ways: 2, scores: rows}",
    ),
    Feature(
        "expert parallel, other sizes on either side",
        "{ep: 2, zero: 1}, {ep: 4, tp: 2}",
        ("model.size=debug-moe-2m",),
    ),
    Feature(
        "the same, in pieces, uneven, and cast",
        "{ep: 2, expert_pieces: 2, expert_shares: [3, 1]}, {ep: 4, expert_cast: fp8}",
        ("model.size=debug-moe-2m",),
    ),
    Feature(
        "unlike parts of heads, channels and vocabulary",
        "{tp: 2, width_shares: [3, 1]}, {tp: 3, width_shares: [1, 2, 1]}",
        ("model.num_kv_heads=4",),
    ),
    Feature("both, axes in another order", "{dp: 2, tp: 2, order: [tp, dp]}, {dp: 4}"),
    Feature("unlike pipelines side by side", UNLIKE),
    Feature("tied embedding", "{}, {}", ("model.family=gpt2", "model.num_layers=3")),
    Feature("recompute (activation checkpointing) on some stages", "{recompute: full}, {}"),
    Feature("activations on the host on some stages", "{device: cuda, recompute: offload}, {}"),
    Feature("`torch.compile` on some stages", "{compile: true}, {}"),
    Feature("fp32 beside bf16", "{precision: fp32}, {precision: bf16}"),
    Feature("fp64 on all stages", "{}, {}", ("compute.precision=fp64",)),
    Feature("ZeRO 1", "{dp: 2, zero: 1}, {}"),
    Feature("ZeRO 2", "{dp: 2, zero: 2}, {}"),
    Feature("ZeRO 3", "{dp: 2, zero: 3}, {}"),
    Feature("ZeRO 1 across pipelines", ACROSS.format(1)),
    Feature("ZeRO 2 across pipelines", ACROSS.format(2)),
    Feature("ZeRO 3 across pipelines", ACROSS.format(3)),
    Feature("several passes over a micro-batch", "{passes: 2}, {}"),
    Feature("tensor parallel in pieces", "{tp: 2, pieces: 2}, {tp: 4, pieces: 3}"),
    Feature("all stages on GPUs", "{}, {}", ("compute.device=cuda",)),
    Feature("GPU and CPU stages", "{device: cuda}, {device: cpu}"),
    Feature("optimizer state on the host beside state on disk", *ELSEWHERE),
    Feature(
        "parameters and activations on disk",
        "{recompute: offload_disk}, {dp: 2, zero: 3, param_tier: disk}",
        ("optim.state_folder=/scratch", "compute.precision=bf16"),
    ),
    Feature("gradients summed in eight bits", "{dp: 2}, {}", ("plan.reduction=fp8",)),
)


def works() -> list[tuple[str, ...]]:
    """Feature by schedule, "yes" or "no"."""
    return [
        (feature.name, *("yes" if feature.works_with(s) else "no" for s in SCHEDULES))
        for feature in FEATURES
    ]


@dataclass(frozen=True)
class Refusal:
    """A plan that is refused."""

    asks: tuple[str, ...]
    """Overrides of `weft train debug`."""
    key: str
    """The key that the message names."""
    why: str
    world_size: int | None = None
    """Processes that another launcher started."""

    @property
    def text(self) -> str:
        started = f" with {self.world_size} processes" if self.world_size else ""
        return f"`{' '.join(self.asks)}`{started}"


REFUSALS = (
    Refusal(
        ("plan.stages=[{layers: 2}, {layers: 2}]",),
        "plan.stages",
        "layers have to add up to the model's",
    ),
    Refusal(
        ("plan.stages=[{tp: 3}, {}]",), "plan.stages[0].tp", "three ranks cannot share 2 key heads"
    ),
    Refusal(
        ("plan.stages=[{cp: 3}]",), "plan.stages[0].cp", "six parts of 128 tokens are not equal"
    ),
    Refusal(("plan.stages=[{ep: 2}]",), "plan.stages[0].ep", "the model has no experts"),
    Refusal(
        ("model.size=debug-moe-2m", "plan.stages=[{ep: 2, expert_shares: [20, 1]}]"),
        "plan.stages[0].expert_shares",
        "one twenty-first of eight experts is none",
    ),
    Refusal(
        ("plan.stages=[{tp: 2, width_shares: [5, 1]}]",),
        "plan.stages[0].width_shares",
        "one sixth of two key heads is none",
    ),
    Refusal(
        ("model.experts={count: 4, top_k: 2, capacity: 1.25}", "plan.stages=[{cp: 2}]"),
        "plan.stages[0].cp",
        "an expert's room is of a whole sample",
    ),
    Refusal(
        ("plan.stages=[{cp: 2, precision: fp8-blockwise}]",),
        "plan.stages[0].cp",
        "128 tokens that have one scale would be in two ranks",
    ),
    Refusal(
        ("plan.stages=[{cp: 8, head_ways: 8}]",),
        "plan.stages[0].head_ways",
        "eight ranks cannot share 4 heads",
    ),
    Refusal(
        ("plan.stages=[{tp: 2, recompute: chunks}]",),
        "plan.stages[0].recompute",
        "ranks sum what they make of all tokens",
    ),
    Refusal(
        ("plan.stages=[{recompute: chunks, precision: fp8}]",),
        "plan.stages[0].recompute",
        "a sample has one scale",
    ),
    Refusal(
        ("plan.stages=[{cp: 4, head_ways: 4, scores: rows}]",),
        "plan.stages[0].scores",
        "with all heads divided no keys go from rank to rank",
    ),
    Refusal(
        ("plan.pipelines=[{share: 4, stages: [{}]}, {stages: [{}, {}]}]",),
        "batch.samples",
        "shares have to divide the batch",
    ),
    Refusal(
        ("plan.stages=[{}, {dp: 2}]",),
        "plan.stages",
        "there have to be as many processes as ranks",
        world_size=2,
    ),
    Refusal(("plan.stages=[{layers: 1.3}, {}]",), "plan.stages[0].layers", "a layer has two parts"),
    Refusal(("plan.shares=[2,1]",), "plan.shares", "one process for each share", world_size=3),
    Refusal(
        ("plan.stages=[{}, {dp: 5}]",), "plan.stages[1].dp", "four samples do not reach five ranks"
    ),
    Refusal(
        ("plan.stages=[{}, {zero: 1}]",),
        "plan.stages[1].zero",
        "no other rank has the parameters of the stage",
    ),
    Refusal(
        ("plan.shares=[2,1]", "plan.schedule=gpipe"), "plan.schedule", "one stage has no order"
    ),
    Refusal(
        ("plan.stages=[{}, {}]", "plan.schedule=zb-v", "plan.chunks=3"),
        "plan.chunks",
        "only interleaving has a choice of it",
    ),
    Refusal(
        ("plan.stages=[{}, {}]", "plan.schedule=made", "plan.head=[1, 1]"),
        "plan.head",
        "no order is made for parts of the head",
    ),
    Refusal(
        ("plan.stages=[{split: [1, 1]}, {}]",),
        "plan.stages[0].split",
        "the mesh holds one stage: `layers` says it",
    ),
    Refusal(
        ("plan.stages=[{tp: 2, order: [tp, dp]}, {}]",),
        "plan.stages[0].order",
        "one axis has no order",
    ),
    Refusal(
        ("plan.stages=[{layers: 0, recompute: full}, {}]",),
        "plan.stages[0].recompute",
        "there is no layer to compute again",
    ),
    Refusal(
        ("plan.stages=[{precision: fp64}, {precision: fp32}]",),
        "compute.precision",
        "gradients are added up in fp64 with fp64, else in fp32",
    ),
    Refusal(
        ("plan.pipelines=[{stages: [{}], micro: 25}]",),
        "plan.pipelines[0].micro",
        "the pipeline takes fewer samples",
    ),
    Refusal(
        ("optim.state_tier=host",),
        "optim.state_tier",
        "a processor's memory is the host's: nothing would be gained",
    ),
    Refusal(
        ("compute.recompute=offload_disk",),
        "optim.state_folder",
        "nothing says where files may be",
    ),
    Refusal(
        ("compute.precision=bf16", "optim.param_tier=host"),
        "optim.param_tier",
        "a processor's memory is the host's: nothing would be gained",
    ),
    Refusal(
        ("plan.stages=[{recompute: offload}, {}]",),
        "plan.stages[0].recompute",
        "a processor's memory is the host's: nothing would be gained",
    ),
    Refusal(
        ("plan.stages=[{}, {}]", "plan.shares=[1]"),
        "plan.stages",
        "the plan is said in two ways",
    ),
)


def refused() -> list[tuple[str, ...]]:
    """What was asked, the key that is named, and why."""
    return [(refusal.text, f"`{refusal.key}`", refusal.why) for refusal in REFUSALS]
