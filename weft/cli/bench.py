"""``weft bench mix``: what a mixed cluster reaches, beside what its parts reach."""

from __future__ import annotations

import json as json_format
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import COLUMNS, err, out, print_json, print_table
from weft.cli.target import OVERRIDES, Json, Overrides, Target, file_to_write, named
from weft.cluster.cluster_file import read_cluster
from weft.config.errors import ConfigError
from weft.elastic.signals import interrupted_once
from weft.lab.lab import refuse_too_much
from weft.lab.leftovers import find_labs, remarks
from weft.lab.tools import why_not_here
from weft.mix.chips import kinds_of
from weft.mix.job import (
    QUICK_RECIPE,
    QUICK_VALUES,
    load_job,
    micros_to_try,
    resolved_alone,
    target_of_trials,
    work_of,
)
from weft.mix.measure import Bench
from weft.mix.mix import MixReport, in_rows, uncertainty
from weft.mix.page import page
from weft.platform.detect import detect, detect_node
from weft.train.run_folder import RunFolder

NUMBERS = ("tokens/s", "+-", "of sum")

app = typer.Typer(help="Measure clusters.", no_args_is_help=True)


@app.command("mix", context_settings=OVERRIDES)
def mix(
    cluster: Annotated[
        str,
        typer.Argument(metavar="CLUSTER", help="A file with hosts, chips of several kinds, links."),
    ],
    target: Target = QUICK_RECIPE,
    overrides: Overrides = None,
    *,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for all of it; less where it is sure before.")
    ] = 5.0,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="A new folder, which keeps the runs.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with timelines.")] = None,
    json: Json = False,
) -> None:
    """Tune and measure each kind of chip alone, then the mix: efficiency and where it comes from.

    Runs in the lab (root on Linux). Example: `weft bench mix examples/clusters/mix-1.0-0.4.yaml
    demo batch.samples=28`. Every plan takes the whole batch of the recipe.
    """
    described = read_cluster(Path(cluster))
    kinds = kinds_of(described)
    recipe, pairs = named(target, overrides)
    if (recipe, pairs) == (QUICK_RECIPE, []):
        pairs = [*QUICK_VALUES]
    loaded = load_job(recipe, pairs)
    alone = resolved_alone(loaded, detect())
    work = work_of(loaded, alone, described.world_size)
    if html is not None:
        file_to_write("--html", html)
    if out_dir is not None and out_dir.exists():
        raise ConfigError("--out", str(out_dir), "a folder that is not there yet")
    with (
        nullcontext() if out_dir is None else RunFolder(out_dir),
        interrupted_once(),
        tempfile.TemporaryDirectory(prefix="weft-bench-") as temporary,
    ):
        if reason := why_not_here():
            raise ConfigError("CLUSTER", cluster, "to be root on Linux", f"No lab here: {reason}.")
        machine = detect_node()
        refuse_too_much(described, machine)
        for remark in remarks(find_labs()):
            err.print(f"[bench] {remark}")
        from weft.data.prepare import prepare

        prepare(alone.config.data, alone.config.seed, report=lambda *_: None)
        report = Bench(
            cluster=described,
            machine=machine,
            work=work,
            micros=micros_to_try(loaded),
            target=target_of_trials(recipe, pairs),
            out=(out_dir or Path(temporary)).absolute(),
            minutes=minutes,
            say=lambda text: err.print(f"[bench] {text}"),
        ).run()
    if html is not None:
        html.write_text(page(report, kinds))
    if out_dir is not None:
        (out_dir / "mix.json").write_text(json_format.dumps(report.to_json(), indent=2))
    print_json(report.to_json()) if json else _show(report)


def _show(report: MixReport) -> None:
    rows = in_rows(report)
    cells = (row.values() for row in rows)
    print_table(rows[0], cells, right=NUMBERS, header_style="dim", **COLUMNS)
    out.print(f"lower bound  {report.lower:.0f} tokens/s, the fastest part alone")
    out.print(f"upper bound  {report.upper:.0f} tokens/s, all parts at their own rates")
    out.print(f"mix          {report.best.middle:.0f} tokens/s: {report.best.trial.name}")
    within = uncertainty(report.efficiencies)
    sure = "" if within is None else f", +- {within:.3f} over {len(report.efficiencies)} turns"
    out.print(f"efficiency   {report.efficiency:.3f} of the upper bound{sure}")
    if report.pooling_gain is None:
        out.print("  the parts' own plans do not run side by side")
    else:
        gain = f"{report.pooling_gain:.3f}"
        out.print(f"  pooling     x {gain} over the fastest part, plans unchanged")
        out.print(f"  re-planning x {report.replanning_gain:.3f} over that")
    for reason in report.reasons:
        out.print(f"unlike work: {reason}")
