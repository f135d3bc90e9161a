"""``weft plan``: what would run, before anything does."""

from __future__ import annotations

import json as json_format
from typing import Any

import typer
from rich.table import Table

from weft.cli.output import count, out, print_json
from weft.cli.target import OVERRIDES, Json, Overrides, Target, load
from weft.cluster.detect import detect
from weft.plan.plan import Plan
from weft.train.resolve import Resolved, read_plan, refuse_without_effect, resolve


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", context_settings=OVERRIDES)(plan)


def plan(target: Target = "demo", overrides: Overrides = None, json: Json = False) -> None:
    """Print the plan of a training run: which rank does what, and with how much of the batch.

    Reads the configuration and looks at this machine; starts nothing, reads no data.
    """
    loaded = load(target, overrides)
    resolved = resolve(loaded, detect(), plan=read_plan(loaded))
    refuse_without_effect(loaded)
    if json:
        print_json(as_json(resolved))
        return
    show(resolved)


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The plan, the model and what was derived."""
    return {
        "plan": json_format.loads(resolved.plan.to_json()),
        "model": {"parameters": resolved.num_parameters, "size": resolved.config.model.size},
        "notes": list(resolved.notes),
    }


def show(resolved: Resolved) -> None:
    """The plan as people read it."""
    config, plan = resolved.config, resolved.plan
    tokens = plan.global_batch * config.data.seq_len
    out.print(
        f"[bold]{config.model.family} {config.model.size}[/]: "
        f"{count(resolved.num_parameters)} parameters, {plan.num_layers} layers; "
        f"{plan.global_batch} samples = {tokens} tokens a step; {config.train.steps} steps"
    )
    out.print(table(plan))
    for note in resolved.notes:
        out.print(f"  {note}", markup=False)


def table(plan: Plan) -> Table:
    """One row a stage."""
    result = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("pipeline", "stage", "ranks", "layers", "samples", "microbatches", "computes"):
        result.add_column(column)
    for p, s, stage in plan.stages():
        pipeline = plan.pipelines[p]
        share = f"{pipeline.samples} ({pipeline.samples / plan.global_batch:.0%})"
        extras = [stage.device, stage.precision]
        extras += ["recompute"] if stage.recompute == "full" else []
        extras += ["compiled"] if stage.compile else []
        result.add_row(
            str(p),
            str(s),
            ", ".join(map(str, stage.mesh.ranks)),
            f"{stage.layers[0]} - {stage.layers[1] - 1}",
            share,
            f"{pipeline.num_microbatches} x {pipeline.microbatch}",
            " ".join(extras),
        )
    return result
