"""A plan as a table: one line a stage."""

from __future__ import annotations

from collections.abc import Iterator

from weft.cli.output import out
from weft.plan.plan import Plan, StagePlan
from weft.report.plan_picture import ranges
from weft.report.units import count
from weft.resolve.resolve import Resolved


def show_plan(resolved: Resolved) -> None:
    """The plan as people read it."""
    config, plan = resolved.config, resolved.plan
    tokens = plan.global_batch * config.data.seq_len
    out.print(
        f"[bold]{config.model.family} {config.model.size}[/]: "
        f"{count(resolved.num_parameters)} parameters, {plan.num_layers} layers; "
        f"{plan.global_batch} samples = {tokens} tokens a step; {config.train.steps} steps"
    )
    heading, *lines = plan_table(plan)
    out.print(heading, style="dim", markup=False)
    for line in lines:
        out.print(line, markup=False)
    for note in resolved.notes:
        out.print(f"  {note}", markup=False)


def plan_table(plan: Plan) -> Iterator[str]:
    """One line a stage, below a heading; columns that say nothing are left out."""
    rows = list(_rows(plan))
    columns = [name for name in rows[0] if name in _ALWAYS or any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        yield "  ".join(f"{row[name]:<{widths[name]}}" for name in columns).rstrip()


_ALWAYS = ("pipeline", "stage", "ranks", "layers", "samples", "microbatches", "computes")


def _rows(plan: Plan) -> Iterator[dict[str, str]]:
    """Column -> text; what holds for a whole pipeline stands beside its first stage."""
    for p, s, stage in plan.stages():
        pipeline = plan.pipelines[p]
        several = len(pipeline.stages) > 1
        share = f"{pipeline.samples}"
        if len(plan.pipelines) > 1:
            share += f" ({pipeline.samples / plan.global_batch:.0%})"
        extras = [stage.device, stage.precision]
        if stage.layers[1] > stage.layers[0]:
            extras += ["recompute"] if stage.recompute == "full" else []
            extras += ["compiled"] if stage.compile else []
        row = {
            "pipeline": str(p),
            "stage": str(s),
            "ranks": ranges(stage.mesh.ranks, dash="-"),
            "mesh": " x ".join(f"{axis} {size}" for axis, size in stage.mesh.axes if size > 1),
            "layers": _layers_held(stage, s, len(pipeline.stages)),
            "samples": share,
            "microbatches": f"{pipeline.num_microbatches} x {pipeline.microbatch}",
            "schedule": pipeline.schedule if several else "",
            "zero": str(stage.zero) if stage.zero else "",
            "passes": str(stage.passes) if stage.passes > 1 else "",
            "computes": " ".join(extras),
        }
        if s:
            row |= dict.fromkeys(("pipeline", "samples", "microbatches", "schedule"), "")
        yield row


def _layers_held(stage: StagePlan, number: int, num_stages: int) -> str:
    """``0-2``; with several stages also the embedding and the head, as ``3 + head``."""
    layers = [ranges(range(*stage.layers), dash="-")] if stage.layers[1] > stage.layers[0] else []
    if num_stages == 1:
        return layers[0]
    parts = ["embed"] if number == 0 else []
    parts += layers
    parts += ["head"] if number == num_stages - 1 else []
    return " + ".join(parts) or "none"
