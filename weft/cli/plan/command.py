"""The command ``weft plan``, and with ``--why`` a plan of the user's beside the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import err, finish, print_json
from weft.cli.plan.forecasts import answer, answer_here, load_for_cluster
from weft.cli.resolved import resolved_here
from weft.cli.target import Json, Overrides, Target, file_to_write, load
from weft.config.axes import NAMES, SAMPLE_AXES
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.planner.search import NoPlan
from weft.report.forecast_page import forecast_page
from weft.resolve.resolve import refuse_without_effect

SHORT = ("pp", *NAMES, "zero", "recompute", "schedule", "micro")
"""What may be given without the name of a section: equal meshes in one pipeline."""
_REPLACED = ("plan.", "plan=", "batch.micro=")

ClusterOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Plan for the chips that this file describes (pools of chips, or a lab's hosts); "
        "nothing of this machine is used. See examples/clusters/.",
    ),
]
NeedOption = Annotated[
    str | None,
    typer.Option(
        metavar="2.0PF",
        help="With --cluster: take so much compute from it, in TF, PF or EF that the workload "
        "reaches, as the cheapest mix of nodes.",
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", help="Say why: the next best plans, what was pruned, what would help."
    ),
]
WhyOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        help="With --cluster: say what became of this plan, beside the one that is found: a "
        'plan.json, "pp=2 dp=4 tp=2 micro=8", or values of plan and batch.',
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page with the plan, timelines and memory."),
]


def plan(
    target: Target = "demo",
    overrides: Overrides = None,
    *,
    cluster: ClusterOption = None,
    need: NeedOption = None,
    explain: ExplainOption = False,
    why: WhyOption = None,
    html: HtmlOption = None,
    json: Json = False,
) -> None:
    """Print the plan of a training run: which rank does what, and what to expect of it.

    Reads the configuration; starts nothing, reads no data. Without --cluster the plan is for this
    machine. With it, the planner finds the fastest plan for those chips, or a plan that is given
    (`plan.stages=...`, `plan.file=...`) is forecast there:

    `weft plan demo model.size=llama3-70b data.seq_len=8192 batch.samples=512
    --cluster examples/clusters/nodes-64.yaml --explain`

    Exit code 2: no plan fits into the memory there is; the output says what is short, and the
    smallest change with which one would.
    """
    if html is not None:
        file_to_write("--html", html)
    if cluster is None:
        for option, value in (("--need", need), ("--why", why)):
            if value is not None:
                raise ConfigError(option, value, "--cluster beside it", "It says what there is.")
        loaded = load(target, overrides)
        resolved = resolved_here(loaded).resolved
        refuse_without_effect(loaded)
        found = answer_here(resolved)
    else:
        words = overrides or []
        loaded = load_for_cluster(target, words)
        compared = None if why is None else load_compared(target, words, why)
        try:
            found = answer(loaded, cluster, need, explain=explain, why=compared)
        except NoPlan as error:
            if json:
                print_json({"fits": False, "problem": str(error)})
            raise
    if html is not None:
        if found.outlook is None:
            raise ConfigError("--html", str(html), "a plan whose chips are known", found.problem)
        html.write_text(forecast_page(found.outlook, found.title), encoding="utf-8")
        err.print(f"wrote {html}")
    if json:
        print_json(found.as_json())
    else:
        found.show(explain=explain)
    finish(found.exit_code)


def load_compared(target: str, overrides: Sequence[str], why: str) -> Loaded:
    """The configuration with the user's plan instead of its own.

    Raises:
        ConfigError: ``why`` is neither a file nor values of a plan.
    """
    kept = [word for word in overrides if not word.removeprefix("--").startswith(_REPLACED)]
    return load(target, [*kept, *_values(why)])


def _values(why: str) -> list[str]:
    if Path(why).suffix == ".json":
        return [f"plan.file={why}", "plan.schedule=null"]
    words = why.split() if "." not in why else _at_keys(why)
    pairs = dict(word.partition("=")[::2] for word in words)
    if all("." in key for key in pairs) and pairs:
        return list(words)
    unknown = [key for key in pairs if key not in SHORT]
    if unknown or not pairs or not all(pairs.values()):
        expected = f"a plan.json, values of plan and batch, or some of {', '.join(SHORT)}"
        raise ConfigError("--why", why, expected, 'Such as --why "pp=2 dp=4 tp=2 micro=8".')
    return list(_equal_stages(pairs))


def _at_keys(why: str) -> list[str]:
    """``plan.stages=[{dp: 2}, {dp: 2}] batch.micro=4``: cut before each ``section.key=``."""
    words: list[str] = []
    for word in why.split():
        key = word.partition("=")[0]
        if "=" in word and ("." in key or key in SHORT) and key.replace(".", "").isidentifier():
            words.append(word)
        elif words:
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _equal_stages(pairs: dict[str, str]) -> Iterator[str]:
    """One pipeline of equal meshes; one sample a rank where nothing is given."""
    stage = {key: pairs[key] for key in (*NAMES, "zero", "recompute") if key in pairs}
    inside = ", ".join(f"{key}: {value}" for key, value in stage.items())
    try:
        num_stages = int(pairs.get("pp", "1"))
    except ValueError:
        raise ConfigError("--why", pairs["pp"], "a number of meshes for pp") from None
    schedule = pairs.get("schedule", "1f1b") if num_stages > 1 else "null"
    yield f"plan.stages=[{', '.join([f'{{{inside}}}'] * num_stages)}]"
    yield f"plan.schedule={schedule}"
    each = [pairs[axis] for axis in SAMPLE_AXES if axis in pairs]
    yield f"batch.micro={pairs.get('micro', each[0] if each else '1')}"
