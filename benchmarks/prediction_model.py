"""What published runs are predicted with: constants of chips, links and software, and their priors.

A constant belongs to a class of chips, to all links, or to all software; a generation of software
has factors of its own on what is known of all, where records tell it apart. Each starts from what
is known without these records. What no record touches stays there, so an unknown chip or framework
is predicted as the others' mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.job import memory_of_job, step_seconds_of_job
from benchmarks.published import Run
from benchmarks.software import AttentionKernel, Kernels
from weft.cluster.cluster import Chip
from weft.cost.memory import Overheads
from weft.cost.rates import OTHER, Efficiency, Roofline, chip_class
from weft.cost.timing import Hardware, Software
from weft.cost.traffic import Fabric
from weft.cost.work import StateBytes

Constants = Mapping[str, float]
Predict = Callable[[Run, Constants], float]

FILE = Path(__file__).with_name("prediction_constants.json")
NEGLIGIBLE = 0.01
"""A constant that stays so near its prior is not kept."""

CHIP_START = {
    "V100": {"matmul": 0.65, "memory": 0.75},
    "T4": {"matmul": 0.45, "memory": 0.6},
    "A100": {"matmul": 0.80, "memory": 0.8},
    "H100": {"matmul": 0.70, "fp8": 0.65, "memory": 0.8},
    "B200": {"matmul": 0.70, "fp8": 0.60, "memory": 0.7},
    "other": {"matmul": 0.70, "fp8": 0.60, "memory": 0.7},
}
"""What is known of a class without these records, from benchmarks of single operations."""
ATTENTION: Mapping[AttentionKernel, Mapping[str, float]] = {
    "scores": {"other": 0.25},
    "flash": {"A100": 0.30, "H100": 0.15, "other": 0.25},
    "flash2": {"A100": 0.55, "H100": 0.33, "B200": 0.25, "other": 0.40},
    "library": {"A100": 0.57, "H100": 0.46, "B200": 0.45, "other": 0.45},
}
"""Parts of the two-byte rate in training, causal, heads of 128, by class of chip: about what the
curves of arXiv 2307.08691 (A100, H100) and 2407.08608 (H100) show; others are guessed from these.
Scores in memory are products, and take none of these."""
TRAFFIC: Mapping[Kernels, float] = {"apart": 2.0, "fused": 1.0, "compiled": 0.9}
"""Through memory beside products, over what operations count, which is each tensor once."""
CHIP_SPREAD = {"matmul": 0.10, "fp8": 0.15, "memory": 0.2}
SOFTWARE = {
    "slowdown": (1.12, 0.2),
    "tensor": (0.6, 0.6),
    "data": (0.2, 0.6),
    "elementwise": (1.2, 0.3),
    "attention": (1.0, 0.3),
    "launch_us": (8.0, 1.0),
}
"""Value, and spread of its logarithm. ``tensor`` and ``data`` are parts of traffic that nothing
hides; ``elementwise`` is memory traffic over that of the model."""
LINKS = {
    "inside": (0.6, 0.15),
    "pcie": (0.35, 0.4),
    "across": (0.75, 0.15),
    "expert": (0.5, 0.6),
    "context": (0.2, 0.6),
    "border": (0.5, 0.6),
    "step_s": (0.02, 0.8),
    "piece_kb": (256.0, 0.6),
    "straggle": (0.005, 0.6),
    "unaligned": (0.3, 0.6),
}
"""For all: parts of a data sheet's rate, parts that nothing hides, and more of the model."""
MEMORY = {
    "runtime_gib": (2.0, 0.4),
    "fragments": (0.05, 1.0),
    "kept": (1.0, 0.2),
    "rest": (1.0, 0.1),
    "shared": (1.0, 0.1),
}
"""Bytes of the runtime, free pieces, and factors on three kinds of bytes: what microbatches keep,
parameters that every rank keeps, state that ranks may share."""
ROOM = 0.96
"""Part of a chip's memory up to which its allocator leaves free pieces free."""


def constant(constants: Constants, name: str) -> float:
    """A fitted value, or its prior."""
    return constants.get(name, prior(name)[0])


def prior(name: str) -> tuple[float, float]:
    """Value, and spread of its logarithm."""
    kind, owner, field = name.split(".")
    if kind == "chip":
        return CHIP_START[owner].get(field, 0.6), CHIP_SPREAD[field]
    return {"links": LINKS, "software": SOFTWARE, "memory": MEMORY}[kind][field]


def kept_constants() -> Constants:
    """Fitted to the development records; ``python -m benchmarks.prediction --fit`` writes them."""
    values: dict[str, float] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    return values


def write_constants(constants: Constants) -> None:
    """Keep those that left their prior."""
    values = {
        name: float(f"{value:.3g}")
        for name, value in sorted(constants.items())
        if abs(value / prior(name)[0] - 1) > NEGLIGIBLE
    }
    FILE.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def time_of(run: Run, constants: Constants) -> float:
    """Predicted seconds of a step."""
    known = {chip.name: hardware_on(run, chip, constants) for chip in run.chips}
    return step_seconds_of_job(run.job, [known[chip.name] for chip in run.chips])


def hardware_on(run: Run, made_by: Chip, constants: Constants) -> Hardware:
    """One kind of a run's chips, their links and the software on them."""

    def of(name: str) -> float:
        return constant(constants, name)

    kind, made = chip_class(made_by), run.generation
    chip, kernels = f"chip.{kind}", ATTENTION[made.attention]
    efficiency = Efficiency(
        matmul=of(f"{chip}.matmul"),
        fp8=of(f"{chip}.fp8") * run.narrow,
        attention=kernels.get(kind, kernels[OTHER]) * of("software.all.attention"),
        memory=of(f"{chip}.memory") / (of("software.all.elementwise") * TRAFFIC[made.kernels]),
    )
    network = run.network_gbit_s or made_by.network_gbit_s or 100.0
    inside = made_by.link_gb_s or 16.0
    link = "pcie" if "PCIe" in made_by.link else "inside"
    fabric = Fabric(
        chips_per_node=run.chips_per_node,
        inside_bytes_s=inside * 1e9 * of(f"links.all.{link}"),
        across_bytes_s=network / 8 * 1e9 * of("links.all.across"),
        piece_bytes=of("links.all.piece_kb") * 1e3,
    )
    software = Software(
        slowdown=of("software.all.slowdown"),
        tensor_hidden=1 - of("software.all.tensor") if run.generation.hides_tensor else 0.0,
        data_hidden=1 - of("software.all.data") if run.generation.overlaps else 0.0,
        border_hidden=1 - of("links.all.border"),
        expert_hidden=1 - of("links.all.expert"),
        context_hidden=1 - of("links.all.context"),
        grad_bytes=run.generation.grad_bytes,
        bucket_bytes=max(run.generation.bucket_bytes, run.generation.bucket_each * run.job.dp),
        publishes_alone=run.generation.publishes_alone,
        layer_messages=run.generation.layer_messages,
        straggle=of("links.all.straggle"),
        step_s=of("links.all.step_s"),
    )
    roofline = replace(
        Roofline.of(made_by, efficiency),
        unaligned=of("links.all.unaligned"),
        launch_s=of("software.all.launch_us") / 1e6,
    )
    return Hardware(chip=roofline, fabric=fabric, software=software)


def memory_of(run: Run, constants: Constants) -> float:
    """Predicted bytes on the rank that was looked at: mostly the one that needs most."""
    job = run.job

    def of(name: str) -> float:
        return constant(constants, f"memory.all.{name}")

    parts = memory_of_job(job, _state(run, of("rest"), of("shared")), Overheads())
    parts = parts[:1] if run.first_alone else parts
    always = _buckets(run) + of("runtime_gib") * 2**30 * (run.counted == "driver")
    room = min(chip.memory_gib for chip in run.chips) * ROOM * 2**30
    fragments = of("fragments") * (run.counted != "allocated")
    most = 0.0
    for position, part in enumerate(parts):
        kept = (part.activations + _kept_besides(run, position)) * of("kept")
        needed = part.total - part.activations + kept + always
        free = fragments * (kept + part.working + part.logits)
        most = max(most, needed + min(free, max(room - needed, 0.0)))
    return most


def _state(run: Run, rest: float, shared: float) -> StateBytes:
    """Of one parameter; what ranks may share comes last."""
    made = run.generation
    if run.job.frozen:
        return StateBytes(weight=2 * rest, grad=0.0, optimizer=0.0)
    if made.fp32_weights or run.job.dtype == "fp32":
        return StateBytes(weight=4 * rest, grad=4 * rest, optimizer=8 * shared)
    optimizer = made.optimizer - 6 * run.byte_moments  # two moments, of one byte instead of four
    return StateBytes(weight=2 * rest, grad=made.main_grad * rest, optimizer=optimizer * shared)


def _buckets(run: Run) -> float:
    """Of gradients and of parameters, in two bytes; two of each where no pipeline paces them."""
    job = run.job
    if not job.zero:
        return 0.0
    elements = min(run.generation.flat_elements, job.shape.params / (job.tp * job.pp))
    return 2 * elements * (2 if job.pp > 1 else 4)


def _kept_besides(run: Run, position: int) -> float:
    """What this software keeps of each microbatch and others do not."""
    job, made = run.job, run.generation
    work = job.works()[position]
    rows = work.tokens / (job.tp if job.sequence_parallel else 1)
    outputs = rows * job.shape.d_model * (made.keeps_outputs and job.pp > 1)
    again = 1 - sum(part for names, part in job.recompute if "full" in names)
    gate = made.keeps_gate and job.shape.gated
    gates = again * work.num_layers * work.tokens * job.shape.d_ff / job.tp * gate
    return job.held(position) * work.wide * (outputs + gates)


def names_for(runs: Sequence[Run], *, memory: bool) -> list[str]:
    """The constants that some of the runs depend on."""
    found: set[str] = set()
    for run in runs:
        job = run.job
        if memory:
            found.update(f"memory.all.{field}" for field in MEMORY)
            continue
        used = {
            "tensor": job.tp > 1,
            "data": job.dp * job.cp > 1 and run.generation.overlaps,
            "attention": job.fused_attention,
            "fp8": job.dtype == "fp8",
        }
        chips = {chip_class(chip) for chip in run.chips}
        fields = [field for field in CHIP_SPREAD if used.get(field, True)]
        found.update(f"chip.{chip}.{field}" for chip in chips for field in fields)
        fields = [field for field in SOFTWARE if used.get(field, True)]
        found.update(f"software.all.{field}" for field in fields)
        links = {"pcie" if "PCIe" in chip.link else "inside" for chip in run.chips}
        rest = {field for field in LINKS if field not in {"pcie", "inside"}}
        found.update(f"links.all.{field}" for field in links | rest)
    return sorted(found)
