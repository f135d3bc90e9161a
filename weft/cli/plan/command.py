"""The command ``weft plan``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.output import err, print_json
from weft.cli.plan.table import show_plan
from weft.cli.resolved import resolved_here
from weft.cli.target import OVERRIDES, Json, Overrides, Target, file_to_write, load
from weft.config.errors import ConfigError
from weft.resolve.resolve import Resolved, refuse_without_effect

if TYPE_CHECKING:
    from weft.planner.outlook import Outlook


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", context_settings=OVERRIDES)(plan)


def plan(
    target: Target = "demo",
    overrides: Overrides = None,
    *,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the chips that this file describes (pools of chips, or a lab's hosts); "
            "nothing of this machine is used. See examples/clusters/.",
        ),
    ] = None,
    need: Annotated[
        str | None,
        typer.Option(
            metavar="2.0PF",
            help="With --cluster: take so much compute from it, in TF, PF or EF that the workload "
            "reaches, as the cheapest mix of nodes.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say why: the next best plans, what was pruned, what would help."
        ),
    ] = False,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="With --cluster: say what became of this plan, beside the one that is found: a "
            'plan.json, "pp=2 dp=4 tp=2 micro=8", or values of plan and batch.',
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the plan, timelines and memory."),
    ] = None,
    json: Json = False,
) -> None:
    """Print the plan of a training run: which rank does what, and what to expect of it.

    Reads the configuration; starts nothing, reads no data. Without --cluster the plan is for this
    machine. With it, the planner finds the fastest plan for those chips, or a plan that is given
    (`plan.stages=...`, `plan.file=...`) is forecast there:

    `weft plan demo model.size=llama3-70b data.seq_len=8192 batch.samples=512
    --cluster examples/clusters/nodes-64.yaml --explain`
    """
    if html is not None:
        file_to_write("--html", html)
    if cluster is not None:
        _plan_on_cluster(
            target,
            overrides or [],
            cluster,
            need=need,
            why=why,
            explain=explain,
            html=html,
            json=json,
        )
        return
    for option, value in (("--need", need), ("--why", why)):
        if value is not None:
            raise ConfigError(option, value, "--cluster beside it", "It says what there is.")
    _plan_here(target, overrides, explain=explain, html=html, json=json)


def _plan_here(
    target: str, overrides: list[str] | None, *, explain: bool, html: Path | None, json: bool
) -> None:
    """For this machine."""
    loaded = load(target, overrides)
    resolved = resolved_here(loaded).resolved
    refuse_without_effect(loaded)
    from weft.cli.plan.forecasts import outlook_here
    from weft.cli.plan.text import show_outlook

    outlook, problem = outlook_here(resolved)
    if html is not None:
        if outlook is None:
            raise ConfigError("--html", str(html), "a plan whose chips are known", problem)
        _write(html, outlook, f"{resolved.config.model.family} {resolved.config.model.size}")
    if json:
        print_json(as_json(resolved) | (UNKNOWN if outlook is None else outlook.as_json()))
        return
    show_plan(resolved)
    if outlook is None:
        err.print(f"no forecast: {problem}", markup=False)
        return
    show_outlook(outlook, explain=explain)


def _plan_on_cluster(
    target: str,
    overrides: list[str],
    cluster: Path,
    *,
    need: str | None,
    why: str | None,
    explain: bool,
    html: Path | None,
    json: bool,
) -> None:
    """For the chips of a file."""
    from weft.cli.plan.forecasts import answer, as_data, load_for_cluster, show_answer
    from weft.cli.plan.why import load_compared

    loaded = load_for_cluster(target, overrides)
    compared = None if why is None else load_compared(target, overrides, why)
    found = answer(loaded, cluster, need, explain=explain, why=compared)
    if html is not None:
        _write(html, found.outlook, found.title)
    print_json(as_data(found)) if json else show_answer(found, explain=explain)


def _write(path: Path, outlook: Outlook, title: str) -> None:
    from weft.report.forecast_page import forecast_page

    path.write_text(forecast_page(outlook, title), encoding="utf-8")
    err.print(f"wrote {path}", markup=False)


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The plan, the model and what was derived."""
    return {
        "plan": json_format.loads(resolved.plan.to_json()),
        "model": {"parameters": resolved.num_parameters, "size": resolved.config.model.size},
        "notes": list(resolved.notes),
    }


UNKNOWN: dict[str, Any] = {"predicted": None, "limits": None, "alternatives": [], "search": None}
"""Of a plan whose chips are not known."""
