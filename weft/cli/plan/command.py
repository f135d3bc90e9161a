"""The command ``weft plan``, and with ``--why`` a plan of the user's beside the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import finish, out, print_json, warn
from weft.cli.plan.forecasts import Answer, answer, answer_here, load_for_cluster
from weft.cli.plan.launch import Launch
from weft.cli.plan.nodes import NodesAsked, nodes_asked
from weft.cli.plan.saved import SUFFIXES, Started, launch_of, save, write
from weft.cli.plan.waiting import watched
from weft.cli.resolved import refuse_unmeasured, resolved_here
from weft.cli.target import Json, Overrides, Target, file_to_write, load
from weft.cluster.cluster_file import read_file
from weft.config.axes import NAMES, SAMPLE_AXES
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.plan_sections import PLAN_WAYS
from weft.planner.search import NoPlan
from weft.report.forecast_page import forecast_page
from weft.resolve.overruled import refuse_without_effect
from weft.resolve.planned import says_a_plan

SHORT = ("pp", *NAMES, "zero", "recompute", "schedule", "micro")
"""What may be given without the name of a section: equal meshes in one pipeline."""
_REPLACED = ("plan.", "plan=", "batch.micro=")
_MAY_DIFFER = ("plan.", "batch.micro", "batch.samples", "compute.recompute")
"""Samples are refused with how many there are."""
MOST_MESHES = 1000
"""That ``pp`` asks for: models have no more layers."""

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
        help="With --cluster: choose the cheapest of its nodes that reach so many FLOP/s with this "
        "workload, in TF, PF or EF.",
    ),
]
CheapestOption = Annotated[
    bool,
    typer.Option(
        "--cheapest",
        help="With --cluster: choose the nodes on which a step costs least, by the price_per_hour "
        "of its pools.",
    ),
]
LeastEnergyOption = Annotated[
    bool,
    typer.Option(
        "--least-energy",
        help="With --cluster: choose the nodes on which a step takes least energy, by the power_w "
        "of its chips.",
    ),
]
WithinOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="With --cheapest or --least-energy: a step may take so long at most.",
    ),
]
GoodputOption = Annotated[
    bool,
    typer.Option(
        "--goodput",
        help="With --cluster: choose the nodes on which most steps stay done where chips fail (the "
        "mtbf_hours of its pools), and say how often to save.",
    ),
]
RestartOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="With --goodput: from a failure until ranks compute again; 120 by default.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --cluster: search for so long at most, and longer only while nothing fits; then "
        "the best so far is the plan. Without it, Ctrl-C does that.",
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
        help="With --cluster: why not this plan? Compare it with the one that is found. A "
        'plan.json, "pp=2 dp=4 tp=2 micro=8", or values of plan and batch.',
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the plan with its chips and hosts, for plan.file; with --launch also a file "
        "for sbatch beside it.",
    ),
]
LaunchOption = Annotated[
    bool,
    typer.Option(
        "--launch",
        help="With --out: print the command that starts it on each node, and a file for Slurm. "
        "Only plans that this version can run are looked at.",
    ),
]
KubernetesOption = Annotated[
    bool,
    typer.Option(
        "--kubernetes",
        help="With --launch: write a manifest for Kubernetes (a JobSet) instead of a file for "
        "Slurm.",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page with the plan, timelines and memory."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What ``weft plan`` may be asked besides a configuration."""

    cluster: ClusterOption = None
    need: NeedOption = None
    cheapest: CheapestOption = False
    least_energy: LeastEnergyOption = False
    within: WithinOption = None
    goodput: GoodputOption = False
    restart: RestartOption = None
    minutes: MinutesOption = None
    explain: ExplainOption = False
    why: WhyOption = None
    out_file: OutOption = None
    launch: LaunchOption = False
    kubernetes: KubernetesOption = False
    html: HtmlOption = None
    json: Json = False


def plan(target: Target = "demo", overrides: Overrides = None, *, options: PlanOptions) -> None:
    """Print the plan of a training run: which rank does what, and what to expect of it.

    Reads the configuration; starts nothing, reads no data. Without --cluster the plan is for this
    machine. With it, the planner finds the fastest plan for those chips, or a plan that is given
    (`plan.stages=...`, `plan.file=...`) is forecast there:

    `weft plan demo model.size=llama3-70b data.seq_len=8192 batch.samples=512
    --cluster examples/clusters/nodes-64.yaml --explain`

    Exit code 2: no plan fits into the memory there is; the output says what is short, and the
    smallest change with which one would.
    """
    _refuse_early(options)
    found = _answer(target, overrides or [], options)
    launch, problem = _launch(found, Started(target, overrides or [], options.cluster), options)
    if options.json:
        print_json(found.as_json() | ({} if launch is None else {"launch": launch.as_json()}))
    else:
        found.show(explain=options.explain)
        if launch is not None:
            out.print(*launch.sentences(), sep="\n")
    _write(found, launch, options)  # what was found is shown by now, whatever becomes of files
    if problem is not None:
        raise problem
    finish(found.exit_code)


def _launch(
    found: Answer, by: Started, options: PlanOptions
) -> tuple[Launch | None, ConfigError | None]:
    """How it is started, or why it cannot be."""
    if not options.launch or options.out_file is None:
        return None, None
    try:
        return launch_of(found, options.out_file, by), None
    except ConfigError as error:
        return None, error


def _write(found: Answer, launch: Launch | None, options: PlanOptions) -> None:
    """The files that were asked for."""
    if options.out_file is not None:
        save(found, options.out_file, launch, kubernetes=options.kubernetes)
    if options.html is None:
        return
    if found.outlook is None:
        expected = "a plan whose chips are known"
        raise ConfigError("--html", str(options.html), expected, found.problem)
    write(options.html, forecast_page(found.outlook, found.title))


def _refuse_early(options: PlanOptions) -> None:
    """What takes no plan to see."""
    for option, file in (("--html", options.html), ("--out", options.out_file)):
        if file is not None:
            file_to_write(option, file)
    _refuse_same_file(options)
    if options.launch and options.out_file is None:
        raise ConfigError("--launch", True, "--out beside it", "The commands name the plan's file.")
    if options.kubernetes and not options.launch:
        expected = "--launch beside it"
        raise ConfigError("--kubernetes", True, expected, "It starts what --out writes.")
    if options.kubernetes and options.cluster is not None and read_file(options.cluster).hosts:
        expected = "a cluster of nodes, where this is a lab of hosts"
        raise ConfigError("--kubernetes", True, expected, "Without it --launch says how it is run.")


def _refuse_same_file(options: PlanOptions) -> None:
    """What is written replaces nothing that is read, or written besides."""
    read = [("--cluster", options.cluster), ("--why", _file_of(options.why))]
    written = [("--html", options.html), ("--out", options.out_file)]
    if options.launch and options.out_file is not None:
        beside = options.out_file.with_suffix(SUFFIXES[options.kubernetes])
        written.append(("--launch", beside))
    known: dict[Path, str] = {}
    for option, file in (*read, *written):
        other = None if file is None else known.setdefault(file.resolve(), option)
        if other not in (None, option) and option != "--why":
            expected = "a file of its own to write"
            raise ConfigError(option, str(file), expected, f"{other} names the same.")


def _answer(target: str, overrides: Sequence[str], options: PlanOptions) -> Answer:
    """The plan for this machine, or for the chips of a file."""
    nodes = nodes_asked(
        options.need,
        by_price=options.cheapest,
        by_energy=options.least_energy,
        within_s=options.within,
        by_goodput=options.goodput,
        restart_s=options.restart,
    )
    if options.cluster is None:
        _refuse_without_cluster(options, nodes)
        loaded = load(target, overrides)
        resolved = resolved_here(loaded, may_plan=True).resolved
        warn(resolved.warnings)
        refuse_without_effect(loaded)
        found = answer_here(resolved)
        if resolved.config.recovery.alarm == "replan":
            cast = found.outlook and found.outlook.forecast
            busy_s = cast.time.busy_s(resolved.plan) if cast else ()
            refuse_unmeasured(loaded, resolved, busy_s, found.problem)
        return found
    loaded = load_for_cluster(target, overrides)
    if options.minutes is not None and says_a_plan(loaded):
        raise ConfigError("--minutes", options.minutes, "no plan beside it", "Nothing is searched.")
    samples, why = loaded.config.batch.samples, options.why
    compared = None if why is None else load_compared(target, overrides, why, samples)
    try:
        with watched(options.minutes) as watch:
            return answer(
                loaded,
                options.cluster,
                nodes,
                watch=watch,
                explain=options.explain,
                why=compared,
                only_runnable=options.launch,
            )
    except NoPlan as error:
        if options.json:
            print_json({"fits": False, "problem": str(error)})
        raise


def _refuse_without_cluster(options: PlanOptions, nodes: NodesAsked | None) -> None:
    """What there is only with chips that a file describes."""
    asked = {"--why": options.why, "--minutes": options.minutes}
    if nodes is not None:
        asked |= {nodes.option: nodes.value}
    for option, value in asked.items():
        if value is not None:
            raise ConfigError(option, value, "--cluster beside it", "It says what there is.")


def load_compared(target: str, overrides: Sequence[str], why: str, samples: int | None) -> Loaded:
    """The configuration with the user's plan of so many samples instead of its own.

    Raises:
        ConfigError: ``why`` is neither a file nor values of a plan.
    """
    kept = [word for word in overrides if not word.removeprefix("--").startswith(_REPLACED)]
    return load(target, [*kept, *_values(why, samples)])


def _values(why: str, samples: int | None) -> list[str]:
    if _file_of(why):
        return [f"plan.file={why}", "plan.schedule=null"]
    words = why.split() if "." not in why else _at_keys(why)
    pairs = dict(word.partition("=")[::2] for word in words)
    if len(pairs) < len(words):
        raise ConfigError("--why", why, "every value once")
    if all("." in key for key in pairs) and pairs:
        _refuse_other_work(why, pairs)
        return list(map("=".join, {"plan.schedule": "null", **pairs}.items()))
    unknown = [key for key in pairs if key not in SHORT]
    if unknown or not pairs or not all(pairs.values()):
        expected = f"a plan.json, values of plan and batch, or some of {', '.join(SHORT)}"
        raise ConfigError("--why", why, expected, 'Such as --why "pp=2 dp=4 tp=2 micro=8".')
    return list(_equal_stages(pairs, samples))


def _file_of(why: str | None) -> Path | None:
    """The plan.json that ``--why`` names, if it is one."""
    return Path(why) if why and Path(why).suffix == ".json" else None


def _refuse_other_work(why: str, keys: Iterable[str]) -> None:
    """Both plans are for the same model and data."""
    for key in keys:
        if not key.startswith(_MAY_DIFFER):
            expected = "values of plan, batch.micro or compute.recompute"
            raise ConfigError("--why", key, expected, "Both plans are for the same model and data.")
    if not any(key == f"plan.{way}" for key in keys for way in PLAN_WAYS if way != "auto"):
        expected = "values that say a plan"
        raise ConfigError("--why", why, expected, 'Such as --why "plan.stages=[{dp: 2}, {dp: 2}]".')


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


def _equal_stages(pairs: dict[str, str], samples: int | None) -> Iterator[str]:
    """One pipeline of equal meshes; one sample a rank where nothing is given, and fewer in the last
    micro-batch where that is what is left."""
    stage = {key: pairs[key] for key in (*NAMES, "zero", "recompute") if key in pairs}
    inside = ", ".join(f"{key}: {value}" for key, value in stage.items())
    try:
        num_stages = int(pairs.get("pp", "1"))
    except ValueError:
        raise ConfigError("--why", pairs["pp"], "a number of meshes for pp") from None
    if not 1 <= num_stages <= MOST_MESHES:
        raise ConfigError("--why", num_stages, f"1 to {MOST_MESHES} meshes for pp")
    if num_stages == 1 and "schedule" in pairs:
        expected = "no schedule with one mesh, which has nothing to wait for"
        raise ConfigError("--why", f"schedule={pairs['schedule']}", expected, "pp=2 has two.")
    schedule = pairs.get("schedule", "1f1b") if num_stages > 1 else "null"
    each = [pairs[axis] for axis in SAMPLE_AXES if pairs.get(axis, "").isdecimal()]
    micro = pairs.get("micro", prod(map(int, each)))
    stages = ", ".join([f"{{{inside}}}"] * num_stages)
    yield f"plan.pipelines=[{{micro: {micro}, stages: [{stages}]}}]"
    yield f"plan.schedule={schedule}"
    yield f"batch.micro={samples or micro}"
