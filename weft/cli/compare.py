"""``weft compare``: are two runs the same but for rounding, and if not, where do they part?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from weft.cli.output import finish, out, print_json
from weft.cli.resolved import resolved_here
from weft.cli.target import Json, load
from weft.config.errors import ConfigError
from weft.resolve.resolve import Resolved


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A run's folder; with --bisect also a recipe or a file."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    *,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture here.")] = None,
    noise: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="C D",
            help="Two runs that differ by seed alone: the noise floor of evaluations.",
        ),
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Run both plans and find where they first part.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="With --bisect: training steps.")] = 3,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="With --bisect: the model as it is, from A's checkpoint, not a small one in fp64.",
        ),
    ] = False,
) -> None:
    """Compare two runs step by step, or two plans tensor by tensor.

    Two run folders: losses against a band that rounding explains, evaluations, data order,
    settings, plans and machines. With --bisect, A and B may also be a recipe or file with
    values after it, in quotes ("demo plan.shares=[1]"); both train a few steps from the same
    start, and the first step, microbatch, layer and module outside the band is named. Exit code
    0: inside the band; 1: outside.
    """
    if bisect:
        _refuse_beside_bisect(html, noise)
        _bisect(a, b, steps=steps, full=full, json=json)
        return
    if full or steps != 3:
        raise ConfigError("--full" if full else "--steps", "", "--bisect beside it")
    from weft.report.compare_page import lines, page, tables, to_json
    from weft.report.compare_runs import compare_runs

    found = compare_runs(Path(a), Path(b), noise)
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
    if json:
        print_json(to_json(found))
    else:
        for table in tables(found):
            shown = RichTable(*table.headers, title=table.caption, title_justify="left")
            for row in table.rows:
                shown.add_row(*row)
            out.print(shown, markup=False)
        for line in lines(found):
            out.print(line, markup=False)
    finish(0 if found.ok else 1)


def _refuse_beside_bisect(html: Path | None, noise: tuple[Path, Path] | None) -> None:
    given = {"--html": html, "--noise": noise}
    for key, value in given.items():
        if value is not None:
            raise ConfigError(key, str(value), "nothing beside --bisect")


def _bisect(a: str, b: str, *, steps: int, full: bool, json: bool) -> None:
    sides = (_resolved("A", a), _resolved("B", b))
    from weft.diagnose.divergence import in_words, to_json
    from weft.diagnose.sides import bisect_sides
    from weft.elastic.pool import WorkerPool

    start = _checkpoints(a) if full else None
    with WorkerPool() as pool:
        found = bisect_sides(pool.run, sides, steps=steps, full=full, start=start)
    if json:
        print_json(to_json(found))
    else:
        ranks = " and ".join(str(plan.world_size) for plan in found.plans)
        model = "" if full else ", a small model of the same kind; --full takes it as it is"
        out.print(f"{ranks} rank(s), {steps} steps, {found.precision}{model}")
        out.print(in_words(found), markup=False)
    finish(0 if found.divergence is None else 1)


def _resolved(key: str, target: str) -> Resolved:
    """A run's folder (its configuration and its plan), or a recipe or file with values."""
    folder = Path(target)
    if folder.is_dir():
        for name in ("config.yaml", "plan.json"):
            if not (folder / name).is_file():
                raise ConfigError(key, target, "the folder of a run", f"There is no {name} in it.")
        loaded = load(str(folder / "config.yaml"), [f"plan.file={folder / 'plan.json'}"])
    else:
        name, *overrides = shlex.split(target) or [""]
        loaded = load(name, overrides)
    return resolved_here(loaded).resolved


def _checkpoints(target: str) -> Path | None:
    folder = Path(target) / "checkpoints"
    return folder if (folder / "latest").exists() else None
