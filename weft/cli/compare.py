"""``weft compare`` and ``weft verify``: are two runs, or plans, the same but for rounding?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import err, finish, out, print_json, print_table
from weft.cli.resolved import resolved_here
from weft.cli.saved import open_saved
from weft.cli.target import Json, Overrides, Target, file_to_write, load
from weft.config.errors import ConfigError, RunError
from weft.elastic.signals import interrupted_once
from weft.resolve.resolve import Resolved

if TYPE_CHECKING:
    from weft.diagnose.verdict import Verdict
    from weft.diagnose.verify import Difference

STEPS = 3


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
    steps: Annotated[int, typer.Option(min=1, help="With --bisect: training steps.")] = STEPS,
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
    start, and the first step, micro-batch, layer and module outside the band is named. Exit code
    0: inside the band; 1: outside.
    """
    if bisect:
        for key, value in (("--html", html), ("--noise", noise)):
            if value is not None:
                said = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                raise ConfigError(key, said, "nothing beside --bisect")
        _bisect(a, b, steps=steps, full=full, json=json)
        return
    _refuse_without_bisect(full, steps)
    if html is not None:
        file_to_write("--html", html)
    from weft.report.compare_page import lines, page, tables, to_json
    from weft.report.compare_runs import compare_runs

    found = compare_runs(Path(a), Path(b), noise)
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
    if json:
        print_json(to_json(found))
    else:
        for table in tables(found):
            print_table(table.headers, table.rows, title=table.caption, title_justify="left")
        out.print(*lines(found), sep="\n")
    finish(0 if found.ok else 1)


def _refuse_without_bisect(full: bool, steps: int) -> None:
    if full or steps != STEPS:
        option, given = ("--full", True) if full else ("--steps", steps)
        raise ConfigError(option, given, "--bisect beside it")


def _bisect(a: str, b: str, *, steps: int, full: bool, json: bool) -> None:
    sides = (_resolved("A", a), _resolved("B", b))
    from weft.checkpoint.store import candidates
    from weft.diagnose.divergence import bisect_sides, in_words, not_compared, to_json
    from weft.elastic.failure import RanksFailedError
    from weft.elastic.pool import WorkerPool

    saved, start = Path(a) / "checkpoints", None
    if full and saved.is_dir() and candidates(saved):
        checkpoint = open_saved(str(saved))
        start = saved / checkpoint.folder.name
        err.print(f"note: both begin from step {checkpoint.step} of A")
    try:
        with interrupted_once(), WorkerPool() as pool:
            found = bisect_sides(pool.run, sides, steps=steps, full=full, start=start)
    except RanksFailedError as error:
        raise RunError(str(error)) from error
    left = not_compared(sides)
    if left:
        err.print(f"note: not compared, for both have samples and steps of A: {', '.join(left)}")
    if json:
        print_json({**to_json(found), "not_compared": left})
    else:
        ranks = " and ".join(str(plan.world_size) for plan in found.plans)
        model = "" if full else ", a small model of the same kind; --full takes it as it is"
        out.print(f"{ranks} rank(s), {steps} steps, {found.precision}{model}")
        out.print(in_words(found))
    finish(0 if found.divergence is None else 1)


def _resolved(key: str, target: str) -> Resolved:
    """A run's folder (its configuration and its plan), or a recipe or file with values."""
    folder = Path(target)
    if target and folder.is_dir():
        for name in ("config.yaml", "plan.json"):
            if not (folder / name).is_file():
                raise ConfigError(key, target, "the folder of a run", f"There is no {name} in it.")
        loaded = load(str(folder / "config.yaml"), [f"plan.file={folder / 'plan.json'}"])
    else:
        try:
            name, *overrides = shlex.split(target) or [""]
        except ValueError as error:
            expected = "a recipe or file, and values as in a shell"
            raise ConfigError(key, target, expected, f"{error}.") from error
        loaded = load(name, overrides)
    return resolved_here(loaded).resolved


def verify(
    target: Target = "demo",
    overrides: Overrides = None,
    json: Json = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
) -> None:
    """Train a few steps under the plan, in one process and by a reference, and compare everything.

    The model is made small and the data random, with random loss weights; the plan's shares,
    micro-batches and settings are kept, and precision is fp64 unless compute.precision says
    otherwise; around eight bits, and with experts in two bytes, it is fp64. The reference is the
    model written out a second time, with PyTorch's optimizer; one process is compared with it. Exit
    code 0 only if every loss, gradient, norm and parameter agrees within the stated tolerance.
    """
    loaded = load(target, overrides)
    resolved = resolved_here(loaded).resolved
    from weft.diagnose.verdict import verify_plan
    from weft.elastic.pool import WorkerPool

    with _refused_by_ranks(), interrupted_once(), WorkerPool() as pool:
        found = verify_plan(pool.run, resolved.plan, resolved.spec, resolved.config, steps=steps)
    if json:
        print_json(found.to_json())
    else:
        _print_verdict(found)
    finish(0 if found.ok else 1)


@contextmanager
def _refused_by_ranks() -> Iterator[None]:
    """What only they find out about a configuration is a mistake in it."""
    from weft.elastic.failure import RanksFailedError

    try:
        yield
    except RanksFailedError as error:
        if error.first.cause != "config":
            raise
        raise ConfigError("", None, "", error.first.message) from error


def _print_verdict(found: Verdict) -> None:
    """Both comparisons, each with what it says."""
    limit = f"(tolerance {found.tolerance:.0e})"
    eight = ", eight bits with all else in fp64" * found.dtype.endswith("-fp64")
    out.print(
        f"{found.ranks} rank(s) against one process, {found.steps} steps, {found.dtype}{eight}"
    )
    _print_difference(found.plan, found.tolerance)
    good = found.accepts(found.plan)
    verdict = "[green]the plan changes nothing[/]" if good else "[red]THE PLAN DIFFERS[/]"
    out.print(f"{verdict} {limit}", markup=True)
    if found.reference is None:
        out.print(f"one process is compared with no reference: {found.lacks}")
        return
    out.print("one process against the reference (the model written out, PyTorch's optimizer)")
    _print_difference(found.reference, found.tolerance)
    good = found.accepts(found.reference)
    right, wrong = "one process is what it computes", "ONE PROCESS DIFFERS FROM IT"
    verdict = f"[green]{right}[/]" if good else f"[red]{wrong}[/]"
    out.print(f"{verdict} {limit}", markup=True)


def _print_difference(found: Difference, tolerance: float) -> None:
    for name in ("loss", "grad", "param", "grad_norm"):
        value, rest = getattr(found, name), ""
        if name == "param" and found.param_beyond <= tolerance < value:
            rest = f", {found.param_beyond:.2e} of it more than rounding of gradients explains"
        out.print(f"  {name:<10} largest relative difference {value:.2e}{rest}")
