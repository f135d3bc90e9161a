"""Plans with their forecasts: for this machine, and for chips that a file describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from weft.cli.output import err, out
from weft.cli.plan.nodes import Chosen, NodesAsked
from weft.cli.plan.text import (
    cluster_in_words,
    comparison,
    folded,
    in_words,
    memory_table,
    plan_table,
    print_plan,
    show_plan,
    why_in_words,
)
from weft.cli.target import load
from weft.cluster.cluster import HOST
from weft.cluster.cluster_file import read_view
from weft.cluster.host_names import is_host
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import Loaded, recipe_names
from weft.config.sections import SitesConfig
from weft.config.tree import COMMAND_LINE
from weft.cost.work import width_of
from weft.models.registry import shape_of
from weft.plan.plan_file import NodesUsed, PlanFile, nodes_used
from weft.planner.explain import NO_GAIN, Comparison, compare
from weft.planner.forecast import forecast, memory_by_position
from weft.planner.in_sites import Apart, apart, long_enough, search_in_sites
from weft.planner.need import in_units
from weft.planner.outlook import Outlook, outlook_of_plan, outlook_of_search
from weft.planner.problem import Problem
from weft.planner.search import Found, Watch, search, seldom_collected
from weft.planner.search.found import together
from weft.platform.detect import detect_node
from weft.report.units import count, some
from weft.resolve.cluster_plan import PlanRequest, plan_request
from weft.resolve.memory_here import needs_here, way_out
from weft.resolve.planned import says_a_plan, with_compiled
from weft.resolve.prediction import UNMEASURED, chips_here
from weft.resolve.rank_chips import RankChips, chips_of_file
from weft.resolve.resolve import Resolved, vocab_size_asked
from weft.resolve.usual_precision import usual_precision
from weft.simulate.known import core_name

UNKNOWN: dict[str, Any] = {
    "not_run": [],
    "predicted": None,
    "limits": None,
    "alternatives": [],
    "search": None,
}
"""Of a plan whose chips are not known."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and what to expect of it where its chips are known."""

    title: str
    """Of a page."""
    facts: dict[str, Any]
    """The model and what was derived: with ``more``, what ``--json`` prints beside the outlook."""
    show_plan: Callable[[], None]
    outlook: Outlook | None
    problem: str = ""
    """Why nothing can be expected but memory."""
    memory: tuple[str, ...] = ()
    """What can be said of that alone, in lines; and where a plan does not fit."""
    compared: Comparison | None = None
    """A plan that was asked about."""
    more: dict[str, Any] = field(default_factory=dict)
    file: PlanFile
    """The plan with its chips, as ``--out`` writes it."""
    vocabulary: tuple[str, ...] = ()
    """What a command that runs it has to say of the tokens."""
    exit_code: int = 0
    """2: what is shown does not fit, and `weft train` would refuse it with the same code."""

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        outlook = UNKNOWN if self.outlook is None else self.outlook.as_json()
        why = {} if self.compared is None else {"why": self.compared.as_json()}
        plan = {"plan": self.facts.get("plan", self.file.to_data())}
        return self.facts | outlook | plan | self.more | why

    def show(self, *, explain: bool) -> None:
        """For people."""
        self.show_plan()
        if self.outlook is None:
            err.print(f"no forecast: {self.problem}")
        else:
            out.print(*in_words(self.outlook), sep="\n")
            if explain:
                out.print(*why_in_words(self.outlook), sep="\n")
        if self.memory:
            out.print(*self.memory, sep="\n")
        if self.compared is not None:
            out.print(*comparison(self.compared), sep="\n")


def answer_here(resolved: Resolved) -> Answer:
    """What to expect on this machine, or why nothing can be said."""
    plan, config = resolved.plan, resolved.config
    outlook, problem = None, UNMEASURED
    lines: list[str] = []
    try:
        chips = chips_here(resolved)
        known = replace(chips.knowledge, tf32=resolved.config.compute.tf32)
        problem_here = Problem(resolved.workload, chips.view, known)
        if not chips.is_guess:
            outlook = Outlook(forecast=forecast(plan, problem_here))
        else:
            lines += folded(list(memory_table(memory_by_position(plan, problem_here))))
    except ConfigError as error:
        problem = str(error)
    ranks = range(plan.world_size)
    too_large = [need.words for need in needs_here(resolved, plan, ranks) if not need.fits]
    short = f"{'; '.join(too_large)}. {way_out(resolved, ranks)}" if too_large else ""
    if short:
        lines.append(f"does not fit: {short}")
    facts = {
        "plan": PlanFile(plan=plan).to_data(),
        "model": {"parameters": resolved.num_parameters, "size": config.model.size},
        "fits": not too_large,
        "problem": short,
        "notes": list(resolved.notes),
    }
    return Answer(
        title=f"{config.model.label}",
        facts=facts,
        show_plan=partial(show_plan, resolved),
        outlook=outlook,
        problem=problem,
        memory=tuple(lines),
        file=PlanFile(plan=plan, chips=_chips_of_this_machine(resolved)),
        exit_code=2 if short and config.compute.check_memory else 0,
    )


def _chips_of_this_machine(resolved: Resolved) -> tuple[NodesUsed, ...]:
    """What the ranks of a plan are on, where all are here."""
    (node,) = resolved.cluster.nodes
    name = {chip.device: chip.name for chip in node.chips} | {HOST: core_name(node)}
    hosts = (node.host,) if is_host(node.host) else ()
    runs = [(device, len(list(same))) for device, same in groupby(resolved.plan.devices)]
    return tuple(
        NodesUsed(
            chip=name.get(device, device),
            pool=number,
            nodes=1,
            chips_per_node=count,
            node="machine" if len(runs) > 1 else "",
            hosts=hosts,
        )
        for number, (device, count) in enumerate(runs)
    )


SEARCHED_WITHIN = ("plan.schedule", "plan.border", "plan.border_between")
"""What of a plan says how to search for one, and is none by itself."""


def load_for_cluster(target: str, overrides: Sequence[str]) -> Loaded:
    """The configuration; a plan or micro-batch that only the recipe says is for another machine."""
    keys = (word.removeprefix("--").partition("=")[0] for word in (target, *overrides))
    if any(re.match(r"plan\b", key) and key not in SEARCHED_WITHIN for key in keys):
        return load(target, overrides)
    if target not in recipe_names() and "=" not in target and not target.startswith("--"):
        loaded = load(target, overrides)
        if says_a_plan(loaded):
            return loaded
    return load(target, [*overrides, "plan=auto"])


@seldom_collected()
def answer(
    loaded: Loaded,
    file: Path,
    nodes: NodesAsked | None,
    *,
    watch: Watch,
    explain: bool,
    why: Loaded | None = None,
    only_runnable: bool = False,
) -> Answer:
    """Plan, or forecast the plan that was given.

    Args:
        nodes: Which of the file's; None: all.
        watch: Over the searches.
        why: With a plan in it to put beside the one that is found.
        only_runnable: Leave out what this version cannot run.

    Raises:
        ConfigError: nothing fits, or something is not known.
    """
    view = read_view(file)
    chips = chips_of_file(file, detect_node(), view.world_size)
    asked = plan_request(loaded, chips.view, chips.knowledge)
    options = replace(asked.problem.options, only_runnable=only_runnable)
    problem, compared = replace(asked.problem, options=options), None
    mix: Chosen | None = None
    sites = loaded.config.sites
    if asked.plan is not None or sites is not None:
        _refuse_beside("sites" if asked.plan is None else "plan", nodes, why)
    if asked.plan is not None:
        outlook = outlook_of_plan(asked.plan, problem)
    elif sites is not None:
        found = search_in_sites(problem, sites, watch=watch)
        outlook = outlook_of_search(found, problem, explain=False)
    else:
        rival = _rival(why, problem)
        if nodes is None:
            found = search(problem, watch=watch)
            asked, problem, found = _in_their_precision(loaded, asked, problem, found, watch)
        else:
            mix, found = nodes.choose(problem, watch=watch)
            problem = problem.on(mix.cluster)
        outlook = outlook_of_search(found, problem, explain=explain, watch=watch)
        compared = _compared(rival, outlook)
    if nodes is None:
        outlook = replace(outlook, apart=_apart(outlook, problem, sites, watch))
    model = loaded.config.model
    num_parameters = int(shape_of(problem.workload.spec).params)
    facts = {
        "model": {"parameters": num_parameters, "size": model.size},
        "fits": True,
        "problem": "",
        "notes": list(asked.notes),
    }
    plan, used = outlook.forecast.plan, nodes_used(outlook.cluster, chips.view)
    # What is found is priced as it usually runs.
    written = plan if asked.plan else with_compiled(plan, loaded.config, [])
    tokens = problem.workload.spec.vocab_size
    said = tokens == vocab_size_asked(loaded.config)
    title = f"[bold]{model.label}[/]: {count(num_parameters)} parameters"
    return Answer(
        title=f"{model.label} on {cluster_in_words(outlook.cluster)}",
        facts=facts,
        show_plan=partial(_show_plan_there, title, asked, chips, outlook, mix),
        outlook=outlook,
        compared=compared,
        more={} if mix is None else {"mix": mix.as_json()},
        file=PlanFile(plan=written, chips=used),
        vocabulary=() if said else (f"data.vocab_size={tokens}",),
    )


def _in_their_precision(
    loaded: Loaded, asked: PlanRequest, problem: Problem, found: Found, watch: Watch
) -> tuple[PlanRequest, Problem, Found]:
    """What a search found; or as fast a plan of the chips that it takes in the precision that is
    usual for these, where it leaves out those for which all would compute in another. As many bytes
    take as long: it is the same plan then."""
    usual = usual_precision((pool.chip for pool in found.best.cluster.pools), cpu_bf16=False)
    if loaded.config.compute.precision != "auto" or usual == problem.workload.precision:
        return asked, problem, found
    kinds = {pool.chip.name for pool in found.best.cluster.pools}
    used, others = (
        tuple(pool for pool in problem.cluster.pools if (pool.chip.name in kinds) == is_used)
        for is_used in (True, False)
    )
    alone = plan_request(loaded, ClusterView(used), problem.knowledge)
    options = replace(alone.problem.options, only_runnable=problem.options.only_runnable)
    there = replace(alone.problem, options=options)
    if width_of(usual) == width_of(problem.workload.precision):
        again = _recast(found, there)
    else:
        other = search(there, watch=watch)
        again = replace(together([other, found]), best=other.best, others=other.others)
    if again.best.time.step_s > found.best.time.step_s * (1 + NO_GAIN):
        return asked, problem, found
    names = ", ".join(dict.fromkeys(pool.chip.name for pool in others))
    note = f"with {names}, left out, it would be {problem.workload.precision}"
    whole = replace(there, cluster=problem.cluster)
    return replace(alone, notes=(*alone.notes, note)), whole, again


def _recast(found: Found, there: Problem) -> Found:
    """What of it has none but the chips of a problem, in its precision."""
    kinds = {pool.chip.name for pool in there.cluster.pools}
    precision = there.workload.precision
    every = []
    for each in (found.best, *found.others):
        if kinds.issuperset(pool.chip.name for pool in each.cluster.pools):
            plan = each.plan.each(lambda stage: replace(stage, precision=precision))
            own = there.on(each.cluster)
            every.append(replace(each, plan=plan, time=own.time(plan), memory=own.memory(plan)))
    return replace(found, best=every[0], others=tuple(every[1:]))


def _refuse_beside(given: str, nodes: NodesAsked | None, why: Loaded | None) -> None:
    """What is asked of a plan that is to be found among all that are exact."""
    if nodes is not None:
        expected = f"no {given} beside it"
        raise ConfigError(nodes.option, nodes.value, expected, "The planner makes a plan.")
    if why is not None:
        way_out = f"Leave out --why, or {given} with all keys below it: it is told beside a plan"
        hint = f"{way_out} that the planner finds."
        raise ConfigError("--why", "a plan", f"no {given} beside it", hint)


def _apart(
    outlook: Outlook, problem: Problem, asked: SitesConfig | None, watch: Watch
) -> Apart | None:
    """What sites reach by themselves: those of the plan, or beside an exact plan the cluster's."""
    plan, here = outlook.forecast.plan, outlook.forecast.problem
    if plan.sites:
        return apart(plan, here, asked or SitesConfig()) if here.cluster.sites else None
    if outlook.found is None or len(problem.cluster.sites) < 2:
        return None
    try:
        best = search_in_sites(problem, SitesConfig(), watch=watch).best
    except ConfigError:  # some site cannot train by itself, so exact training is all there is
        return None
    there = problem.on(best.cluster)
    usual = long_enough(best.plan, there)
    return apart(best.plan, there, usual, exact_s=outlook.forecast.step_s)


def _show_plan_there(
    model: str, asked: PlanRequest, chips: RankChips, outlook: Outlook, mix: Chosen | None
) -> None:
    """The plan for the chips of a file; ``model``: its name and size, as markup."""
    workload = asked.problem.workload
    out.print(
        f"{model}, {workload.spec.num_layers} layers; {some(workload.samples, 'sample')} = "
        f"{count(workload.samples * workload.seq_len)} tokens a step",
        markup=True,
    )
    if mix is not None:
        out.print(*(f"  {line}" for line in mix.sentences()), sep="\n")
        reached = workload.flops_s(outlook.forecast.step_s)
        out.print(f"  the plan reaches {in_units(reached)}")
    taken = f"{outlook.cluster.world_size:,} of {chips.view.world_size:,} chips"
    out.print(f"{taken}: {cluster_in_words(outlook.cluster)}")
    if mix is None and outlook.cluster.world_size < chips.view.world_size:
        for why in outlook.left_out:
            out.print(f"  left out, for this version cannot run it: {why}", style="yellow")
    out.print(f"plan: {outlook.name}")
    for why in outlook.not_run:
        out.print(f"  this version cannot run it: {why}", style="yellow")
    heading, *lines = plan_table(outlook.forecast.plan)
    notes = (*asked.notes, f"rates from {', '.join(chips.basis)}")
    print_plan(heading, [*folded(lines), *(f"  {note}" for note in notes)])


def _rival(why: Loaded | None, problem: Problem) -> PlanRequest | None:
    """What is to be put beside the best, on all chips that there are."""
    if why is None:
        return None
    try:
        asked = plan_request(why, problem.cluster, problem.knowledge)
    except ConfigErrors as found:
        for error in found.errors:
            error.where = "of --why" if error.where == str(COMMAND_LINE) else error.where
        raise
    assert asked.plan is not None, "a plan was given"
    given, samples = asked.plan.global_batch, problem.workload.samples
    if given != samples:
        raise ConfigError("--why", {"samples": given}, f"{samples} samples a step")
    return asked


def _compared(rival: PlanRequest | None, outlook: Outlook) -> Comparison | None:
    if rival is None:
        return None
    assert rival.plan is not None, "a plan was given"
    best = outlook.forecast
    return compare(rival.plan, best, replace(rival.problem, options=best.problem.options))
