"""Plans with their forecasts: for this machine, and for chips that a file describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from weft.cli.output import err, out
from weft.cli.plan.table import plan_table
from weft.cli.plan.text import cluster_in_words, folded, show_outlook
from weft.cli.plan.why import comparison
from weft.cli.target import load
from weft.cluster.cluster_file import read_view
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.config.load import Loaded, recipe_names
from weft.cost.flops import train_flops_per_token
from weft.models.registry import shape_of
from weft.planner.comparison import Comparison, compare
from weft.planner.forecast import forecast
from weft.planner.limits import limits_of
from weft.planner.naming import name_of
from weft.planner.need import Mix, choose_mix, in_units, parse_need
from weft.planner.outlook import Outlook, outlook_of_plan, outlook_of_search
from weft.planner.search import Found, search
from weft.planner.workload import Workload
from weft.platform.detect import detect_node
from weft.report.units import count
from weft.resolve.cluster_plan import PlanRequest, plan_request, says_a_plan
from weft.resolve.prediction import UNMEASURED, chips_here
from weft.resolve.rank_chips import RankChips, chips_of_file
from weft.resolve.resolve import Resolved

ROUNDS = 6
"""Times that a mix is made larger because plans lose what chips compute."""
SECONDS_BETWEEN_LINES = 2.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is printed."""

    model: str
    """Family and size."""
    asked: PlanRequest
    chips: RankChips
    outlook: Outlook
    mix: Mix | None = None
    compared: Comparison | None = None
    """A plan that was asked about."""

    @property
    def title(self) -> str:
        """Of a page."""
        return f"{self.model} on {cluster_in_words(self.outlook.cluster)}"

    @property
    def flops_s(self) -> float:
        """Model FLOP/s that the plan reaches."""
        return model_flops_s(self.asked.workload, self.outlook.forecast.step_s)

    @property
    def num_parameters(self) -> int:
        return int(shape_of(self.asked.workload.spec).params)


def outlook_here(resolved: Resolved) -> tuple[Outlook | None, str]:
    """What to expect on this machine, or why nothing can be said."""
    plan = resolved.plan
    _, _, stage = next(iter(plan.stages()))
    workload = Workload(
        spec=resolved.spec,
        seq_len=resolved.config.data.seq_len,
        samples=plan.global_batch,
        precision=stage.precision,
    )
    try:
        chips = chips_here(resolved)
        if chips.is_guess:
            return None, UNMEASURED
        cast = forecast(plan, workload, chips.view, chips.knowledge)
    except ConfigError as error:
        return None, str(error)
    name = name_of(plan, chips.view)
    return Outlook(name=name, cluster=chips.view, forecast=cast, limits=limits_of(cast)), ""


def load_for_cluster(target: str, overrides: Sequence[str]) -> Loaded:
    """The configuration; a plan or micro-batch that only the recipe says is for another machine."""
    words = [target, *overrides]
    if any(word.removeprefix("--").startswith(("plan.", "plan=")) for word in words):
        return load(target, overrides)
    if target not in recipe_names() and "=" not in target and not target.startswith("--"):
        loaded = load(target, overrides)
        if says_a_plan(loaded):
            return loaded
    return load(target, [*overrides, "plan=auto"])


def answer(
    loaded: Loaded, file: Path, need: str | None, *, explain: bool, why: Loaded | None = None
) -> Answer:
    """Plan, or forecast the plan that was given.

    Args:
        why: With a plan in it to put beside the one that is found.

    Raises:
        ConfigError: nothing fits, or something is not known.
    """
    view = read_view(file)
    chips = chips_of_file(file, detect_node(), view.world_size)
    asked = plan_request(loaded, chips.view)
    model = f"{loaded.config.model.family} {loaded.config.model.size}"
    if asked.plan is not None:
        if need is not None:
            raise ConfigError("--need", need, "no plan beside it", "The planner makes one.")
        if why is not None:
            raise ConfigError("--why", "a plan", "no other plan beside it", "One is to be found.")
        outlook = outlook_of_plan(asked.plan, asked.workload, chips.view, chips.knowledge)
        return Answer(model=model, asked=asked, chips=chips, outlook=outlook)
    if need is None:
        mix, cluster, found = None, chips.view, _search(asked, chips, chips.view)
    else:
        mix, found = _enough(asked, chips, parse_need(need))
        cluster = mix.cluster
    outlook = outlook_of_search(
        found,
        asked.workload,
        chips.knowledge,
        asked.options,
        everything=cluster,
        explain=explain,
    )
    compared = None
    if why is not None:
        other = replace(plan_request(why, cluster), options=asked.options)
        compared = _compared(other, outlook, chips, cluster)
    return Answer(
        model=model, asked=asked, chips=chips, outlook=outlook, mix=mix, compared=compared
    )


def _compared(
    asked: PlanRequest, outlook: Outlook, chips: RankChips, cluster: ClusterView
) -> Comparison:
    assert asked.plan is not None, "a plan was given"
    best = outlook.forecast
    samples = asked.plan.global_batch
    if samples != best.plan.global_batch:
        raise ConfigError("--why", {"samples": samples}, f"{best.plan.global_batch} samples a step")
    knowledge = chips.knowledge
    return compare(asked.plan, best, asked.workload, cluster, knowledge, asked.options)


def _search(asked: PlanRequest, chips: RankChips, cluster: ClusterView) -> Found:
    return search(
        asked.workload,
        cluster,
        knowledge=chips.knowledge,
        options=asked.options,
        progress=_progress(),
    )


def _enough(asked: PlanRequest, chips: RankChips, need: float) -> tuple[Mix, Found]:
    """The mix whose best plan does it: waiting and links take from what chips compute."""
    wanted = need
    for _ in range(ROUNDS):
        mix = choose_mix(chips.view, asked.workload, chips.knowledge, wanted)
        found = _search(asked, chips, mix.cluster)
        reached = model_flops_s(asked.workload, found.best.time.step_s)
        if reached >= need:
            return mix, found
        if mix.cluster.world_size == chips.view.world_size:
            break
        wanted = min(max(mix.flops_s, wanted) * need / reached, _all_of(asked, chips))
    expected = f"at most {in_units(reached)}, what the best plan found reaches"
    hint = "More samples a step let more chips work."
    raise ConfigError("--need", in_units(need), expected, hint)


def _all_of(asked: PlanRequest, chips: RankChips) -> float:
    return choose_mix(chips.view, asked.workload, chips.knowledge, 0.0).most_flops


def model_flops_s(workload: Workload, step_s: float) -> float:
    """Model FLOP/s where a step takes so long."""
    flops = train_flops_per_token(workload.spec, workload.seq_len)
    return flops * workload.seq_len * workload.samples / step_s


def _progress() -> Callable[[int, float], None]:
    """Says now and then how far a long search is."""
    said = monotonic()

    def tell(done: int, best_s: float) -> None:
        nonlocal said
        if monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = monotonic()
            best = f", the best takes {best_s:.3g} s a step" if best_s < float("inf") else ""
            err.print(f"searching: {done:,} candidates done{best}", style="dim")

    return tell


def as_data(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints."""
    size = answer.model.partition(" ")[2]
    about = {
        "model": {"parameters": answer.num_parameters, "size": size},
        "notes": list(answer.asked.notes),
    }
    mix = {} if answer.mix is None else {"mix": answer.mix.as_json()}
    why = {} if answer.compared is None else {"why": answer.compared.as_json()}
    return about | answer.outlook.as_json() | mix | why


def show_answer(answer: Answer, *, explain: bool) -> None:
    """For people."""
    workload, outlook = answer.asked.workload, answer.outlook
    out.print(
        f"[bold]{answer.model}[/]: {count(answer.num_parameters)} parameters, "
        f"{workload.spec.num_layers} layers; {workload.samples} samples = "
        f"{count(workload.samples * workload.seq_len)} tokens a step"
    )
    if answer.mix is not None:
        for line in answer.mix.sentences():
            out.print(f"  {line}", markup=False)
        out.print(f"  the plan reaches {in_units(answer.flops_s)} of it", markup=False)
    chips = f"{outlook.cluster.world_size:,} of {answer.chips.view.world_size:,} chips"
    out.print(f"{chips}: {cluster_in_words(outlook.cluster)}", markup=False)
    out.print(f"plan: {outlook.name}", markup=False)
    heading, *lines = plan_table(outlook.forecast.plan)
    out.print(heading, style="dim", markup=False)
    for line in folded(lines):
        out.print(line, markup=False)
    for note in (*answer.asked.notes, f"rates from {', '.join(answer.chips.basis)}"):
        out.print(f"  {note}", markup=False)
    show_outlook(outlook, explain=explain)
    for line in comparison(answer.compared) if answer.compared else ():
        out.print(line, markup=False)
