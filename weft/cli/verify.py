"""``weft verify``: prove on this machine that a plan changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.output import finish, out, print_json
from weft.cli.resolved import resolved_here
from weft.cli.target import OVERRIDES, Json, Overrides, Target, load


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", context_settings=OVERRIDES)(verify)


def verify(
    target: Target = "demo",
    overrides: Overrides = None,
    json: Json = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
) -> None:
    """Train a few steps twice, under the plan and in one process, and compare everything.

    The model is made small and the data random, with random loss weights; the plan's shares,
    microbatches and settings are kept, and precision is fp64 unless compute.precision says
    otherwise. Exit code 0 only if every loss, gradient, norm and parameter agrees within the
    stated tolerance.
    """
    loaded = load(target, overrides)
    resolved = resolved_here(loaded).resolved
    from weft.diagnose.verify import verify_plan
    from weft.elastic.pool import WorkerPool

    with WorkerPool() as pool:
        found = verify_plan(pool.run, resolved.plan, resolved.spec, resolved.config, steps=steps)
    if json:
        print_json(found.to_json())
    else:
        out.print(f"{found.ranks} rank(s) against one process, {steps} steps, {found.dtype}")
        for name, value in found.difference.by_name().items():
            out.print(f"  {name:<10} largest relative difference {value:.2e}")
        verdict = "[green]the plan changes nothing[/]" if found.ok else "[red]THE PLAN DIFFERS[/]"
        out.print(f"{verdict} (tolerance {found.tolerance:.0e})")
    finish(0 if found.ok else 1)
