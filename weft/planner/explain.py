"""Why this plan and not another, and what other chips would change: sentences with figures.

Other plans are those that the search found next, and one that a person asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from math import ceil, floor, inf

from weft.cluster.view import ClusterView
from weft.cost.sent import Way
from weft.memory.tiers import APART
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import CHECKPOINTING, shortages, smallest_change, without_recompute
from weft.planner.forecast import Forecast, forecast
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, Watch, search
from weft.planner.search.choice import LONG
from weft.planner.search.domains import domains_of_kinds, has_slower_links
from weft.planner.search.found import MEANING, Reason
from weft.planner.search.orders import with_made_orders
from weft.planner.search.verdict import verdict
from weft.recompute.asked import computed_again, offloads

_FEW_CUTS = 5
"""Up to which every way to move them out of layers is tried."""
NO_GAIN = 5e-4
"""Part of tokens a second below which a change is said to bring nothing."""
ROUNDED = 1e-9
"""Part of a step below which a difference of sums is their rounding."""
SEARCHING_S = 30.0
"""For all questions about other chips together. Those for which that leaves no search are asked of
the plan that was found."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that lost."""

    candidate: Candidate
    slower: float
    """Part of the best step by which its own is longer."""
    words: str

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "name": self.candidate.name,
            "settings": settings(self.candidate.plan),
            "step_time_s": self.candidate.time.step_s,
            "slower": self.slower,
            "why": self.words,
        }


@dataclass(frozen=True, slots=True)
class Help:
    """What a change of the chips would bring."""

    change: str
    """``memory x 2``."""
    step_s: float
    gain: float
    """Part by which more tokens a second pass."""
    worth_per_hour: float | None = None
    """What it may cost at most for a token to cost no more, in the currency of the cluster's file;
    None where a price is not known."""
    costs_per_hour: float | None = None
    """What it costs, where the file says that."""
    same_plan: bool = False
    """Asked of the plan that was found: another may gain more."""

    @property
    def words(self) -> str:
        """``memory x 2: 3.1 % more tokens a second, worth up to 0.62 an hour``."""
        asked = f"{self.change}, by this plan" if self.same_plan else self.change
        if self.gain < NO_GAIN:
            return f"{asked}: no gain"
        words = f"{asked}: {self.gain:.1%} more tokens a second"
        if self.worth_per_hour is not None:
            words += f", worth up to {self.worth_per_hour:.3g} an hour"
        if self.costs_per_hour is not None:
            words += f" and hired for {self.costs_per_hour:.3g}"
        return words

    @property
    def pays(self) -> float:
        """Gain, for each part of today's price that it costs where that is known."""
        worth, costs = self.worth_per_hour, self.costs_per_hour
        return worth / costs if worth is not None and costs else self.gain

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "change": self.change,
            "step_time_s": self.step_s,
            "gain": self.gain,
            "worth_per_hour": self.worth_per_hour,
            "costs_per_hour": self.costs_per_hour,
            "same_plan": self.same_plan,
        }


def alternatives(found: Found, best: Forecast, problem: Problem) -> Iterator[Alternative]:
    """The next best plans, and why each lost."""
    for other in found.others:
        there = problem.on(other.cluster)
        theirs = forecast(other.plan, there, time=other.time)
        slower = theirs.step_s / best.step_s - 1
        yield Alternative(other, slower, _why(best, theirs) + _forced(other, there))


def settings(plan: Plan) -> str:
    """How the pipelines of a plan are set up, besides what its name says."""
    words = dict.fromkeys(_settings(pipeline) for pipeline in plan.pipelines[:4])
    domains = f"; {len(plan.domains)} domains" if plan.domains else ""
    return " | ".join(words) + domains


def what_domains_save(cast: Forecast) -> str:
    """Of a plan with domains, in a line; empty of others. What no domain could have alone without
    them, ZeRO 3 beside other pipelines, is compared as ZeRO 2."""
    plan, problem = cast.plan, cast.problem
    if not plan.domains:
        return ""
    whole = replace(plan, domains=())
    if len(plan.pipelines) > 1:
        whole = whole.each(lambda stage: replace(stage, zero=min(stage.zero, 2)))
    far = [
        sum(sent for way, sent in each.items() if way in _SUMMED) / 1e9
        for each in (problem.sent(plan), problem.sent(whole))
    ]
    short = shortages(whole, problem)
    took = f"would take {problem.time(whole).step_s:.3g} s a step, not {cast.step_s:.3g}"
    return (
        f"domains: {far[0]:.3g} GB of gradients and parameters between nodes; all ranks as one "
        f"would send {far[1]:.3g} GB there and {'would not fit' if short else took}"
    )


def what_cuts_save(cast: Forecast) -> str:
    """Of a plan with borders inside layers, in a line; empty of others. Compared with the same at
    the layers next to them, of few such borders whichever way that fits is best: with lists made
    for it where the plan has such, else both in the order of their schedule."""
    problem = cast.problem
    pipelines = tuple(replace(pipeline, lists=()) for pipeline in cast.plan.pipelines)
    plan = replace(cast.plan, pipelines=pipelines)
    makes_lists = plan != cast.plan and problem.options.in_flight
    cuts = sorted(plan.cuts)
    if not cuts:
        return ""
    rounded: tuple[Callable[[float], int], ...] = (
        (floor, ceil) if len(cuts) <= _FEW_CUTS else (floor,)
    )

    def at_layers(ways: Iterable[Callable[[float], int]]) -> Plan:
        moved = {cut: way(cut) for cut, way in zip(cuts, ways, strict=True)}

        def whole(stage: StagePlan) -> StagePlan:
            first, end = (moved.get(at, at) for at in stage.layers)
            return replace(stage, layers=(first, end))

        return plan.each(whole)

    every = map(at_layers, product(rounded, repeat=len(cuts)))
    fitting = [each for each in every if not shortages(each, problem)]
    words = f"borders inside layers {', '.join(str(floor(cut)) for cut in cuts)}: with whole layers"
    if not fitting:
        return f"{words} beside them it would not fit"
    whole_s = _least_s(fitting, problem, makes_lists=makes_lists)
    longer = whole_s / (cast.step_s if makes_lists else problem.time(plan).step_s) - 1
    took = f"{abs(longer):.1%} {'less' if longer < 0 else 'longer'}"
    return f"{words} beside them a step would take {took}"


def _least_s(plans: Iterable[Plan], problem: Problem, *, makes_lists: bool) -> float:
    """The least step of plans for all chips of a problem, with lists made for it."""
    times = [(problem.time(plan), plan) for plan in plans]
    time, plan = min(times, key=lambda both: both[0].step_s)
    if not makes_lists:
        return time.step_s
    there, memory = problem.cluster, problem.memory(plan)
    name = name_of(plan, there)
    best = Candidate(name=name, plan=plan, cluster=there, time=time, memory=memory)
    return with_made_orders(best, problem).time.step_s


def why_no_domains(cast: Forecast) -> str:
    """Of a plan without domains, in a line: what a step would take with them; empty of others."""
    plan, problem = cast.plan, cast.problem
    if plan.domains or plan.world_size == 1:
        return ""
    if not problem.options.domains:
        return "domains: none, as plan.auto.domains=false asks"
    if not has_slower_links(problem):
        return "domains: none, all links are alike"
    words = [
        f"by {apart.kind} "
        + (
            "it would not fit"
            if shortages(apart.plan, problem)
            else f"a step would take {problem.time(apart.plan).step_s:.3g} s, not {cast.step_s:.3g}"
        )
        for apart in domains_of_kinds(plan, problem.cluster)
    ]
    return f"domains: none; {'; '.join(words) or 'no several ranks of one hold what others do'}"


_SUMMED = Way("gradients", "across"), Way("parameters", "across")


def _settings(pipeline: PipelinePlan) -> str:
    words = [pipeline.order] if pipeline.order else []
    modes = [stage.recompute for stage in pipeline.stages]
    words += ["recompute"] * any(computed_again(each) != "off" for each in modes)
    for tier in APART:
        words += [f"activations on {tier}"] * any(offloads(each, None, tier) for each in modes)
    words += [f"ZeRO {max(stage.zero for stage in pipeline.stages)}"]
    return ", ".join([*words, _micro_batches(pipeline)])


def _micro_batches(pipeline: PipelinePlan) -> str:
    """With the samples where they are not the product."""
    number, each = pipeline.num_microbatches, pipeline.microbatch
    if number == 1:
        return f"1 micro-batch of {pipeline.samples}"
    if pipeline.samples % each:
        return f"{number} micro-batches of up to {each}, {pipeline.samples} samples in all"
    return f"{number} micro-batches of {each}"


def _why(best: Forecast, other: Forecast) -> str:
    """Where the slowest positions' time differs, the largest difference first."""
    verbs = (
        "computes",
        "communicates inside layers",
        "waits for other stages",
        "exchanges and updates at the end",
    )
    differences = {verb: b - a for verb, a, b in zip(verbs, *_seconds(best, other), strict=True)}
    longer = sorted(differences.items(), key=lambda item: -item[1])
    least = 0.05 * max(other.step_s - best.step_s, 1e-12)
    parts = [f"{what} {seconds:.3g} s longer" for what, seconds in longer if seconds > least]
    gains = [f"{what} {-seconds:.3g} s less" for what, seconds in longer if seconds < -least]
    if not parts:
        return "takes as long; another of the same speed was taken"
    return " and ".join(parts) + (f", though it {' and '.join(gains[:1])}" if gains else "")


def _seconds(*casts: Forecast) -> Iterator[tuple[float, ...]]:
    """Of a step of each slowest position: computing, messages, waiting, what is done once."""
    for slow in (cast.slowest for cast in casts):
        yield slow.computing_s, slow.communicating_s, slow.waiting_s, slow.once_s


def _forced(candidate: Candidate, problem: Problem) -> str:
    """Says so where a plan recomputes only because its chips' memory demands it."""
    kept = without_recompute(candidate.plan)
    short = [] if kept == candidate.plan else shortages(kept, problem)
    if not short:
        return ""
    need, room, chip = short[0].need_gib, short[0].room_gib, short[0].chip.name
    words = f"without it a {chip} would need {need:.1f} GiB of {room:.1f}"
    modes = {computed_again(stage.recompute) for _, _, stage in candidate.plan.stages()}
    does = "keeps activations on hosts" if modes == {"off"} else f"recomputes ({CHECKPOINTING})"
    return f"; it {does}, for {words}"


CHANGES: Mapping[str, Callable[[Problem], Problem]] = {
    "memory x 2": lambda problem: problem.with_memory(2.0),
    "network between nodes x 2": lambda problem: problem.with_links(1.0, 2.0),
    "links inside nodes x 2": lambda problem: problem.with_links(2.0, 1.0),
    "memory x 1.25": lambda problem: problem.with_memory(1.25),
}
"""Those of which most may be expected come first."""


def what_would_help(
    problem: Problem, best: Candidate, *, searches: int, watch: Watch | None = None
) -> Iterator[Help]:
    """A node more of a kind, more memory, or faster links, one after another: the step then.

    Args:
        best: The plan for the chips as they are.
        searches: For so many there is a new plan; further changes are asked of the same plan, with
            more memory also without recomputation.
        watch: Over the searches; what it ends early says nothing.
    """
    watch = watch or Watch()
    kept = without_recompute(best.plan)
    hired = price_per_hour(best.cluster)
    more = list(islice(_nodes_more(problem, best.time.step_s, hired, watch), searches))
    yield from more
    for number, (name, change) in enumerate(CHANGES.items(), start=len(more)):
        there = change(problem.on(best.cluster))
        plans = [best.plan] + [kept] * (kept != best.plan and not shortages(kept, there))
        searched_s = _searched_s(change(problem), watch) if number < searches else inf
        step_s = min(searched_s, *(there.time(plan).step_s for plan in plans))
        gain = best.time.step_s / step_s - 1
        worth = None if hired is None else gain * hired
        yield Help(name, step_s, gain, worth, same_plan=searched_s == inf)


def _searched_s(problem: Problem, watch: Watch) -> float:
    """What a step of the best plan takes; without end where the search was not ended."""
    if watch.is_over:
        return inf
    found = search(problem, watch=watch.aside())
    return inf if found.is_cut_short else found.best.time.step_s


def _nodes_more(
    problem: Problem, best_s: float, hired: float | None, watch: Watch
) -> Iterator[Help]:
    """A node more of each kind, with another search that was not ended early."""
    for number, pool in enumerate(problem.cluster.pools):
        if pool.has_network and not pool.node and pool.site is None:
            larger = problem.on(with_node(problem.cluster, number))
            step_s = _searched_s(larger, watch)
            if step_s == inf:
                return
            gain, node = best_s / step_s - 1, replace(pool, num_nodes=1, hosts=())
            worth = None if hired is None else gain * hired
            costs = None if hired is None else price_per_hour(ClusterView((node,)))
            name = f"one more node of {pool.chips_per_node} x {pool.chip.name}"
            yield Help(name, step_s, gain, worth, costs)


def with_node(cluster: ClusterView, number: int) -> ClusterView:
    """With a node more of a pool."""
    pools = list(cluster.pools)
    pool = pools[number]
    pools[number] = replace(pool, num_nodes=pool.num_nodes + 1, hosts=())
    return ClusterView(tuple(pools))


def price_per_hour(cluster: ClusterView) -> float | None:
    """Of all chips; None where a price is not known."""
    total = 0.0
    for pool in cluster.pools:
        if pool.price_per_hour is None:
            return None
        total += pool.num_chips * pool.price_per_hour
    return total


def gap_in_words(found: Found) -> str:
    """How much faster a plan that was not found might be, by the same costs."""
    gap = max(found.gap or 0.0, 0.0)
    words = f"no plan can take less than {found.bound_s:.3g} s: at most {gap:.1%} above that"
    if found.exhausts:
        meshes = [stage.mesh for _, _, stage in found.best.plan.stages()]
        divides = any(mesh.size(axis) > 1 for mesh in meshes for axis in LONG)
        whole = "layers" if divides else "layers and samples"
        words += f"; of whole {whole} in usual orders every plan was weighed or ruled out"
    return words


def pruned_in_words(found: Found) -> Iterator[str]:
    """How many candidates there were, and why most were not simulated."""
    yield (
        f"{found.considered:,} plans considered in {found.seconds:.2g} s, "
        f"{found.pruned.total:,} of them pruned, each for a reason"
    )
    for kind, reason in found.pruned.most_first():
        told = reason.bounds
        bounds = "" if told is None else " (frames of {:.3g} to {:.3g} s)".format(*told)
        yield f"  {kind}: {reason.count:,}{bounds}, such as {reason.examples[0]}"


def reasons_as_json(found: Found) -> list[dict[str, object]]:
    """What ``--json`` prints of those that were pruned, the most frequent reason first."""
    return [
        {
            "kind": kind,
            "means": MEANING[kind],
            "count": reason.count,
            "bounds_s": reason.bounds and list(reason.bounds),
            "examples": reason.examples,
        }
        for kind, reason in found.pruned.most_first()
    ]


@dataclass(frozen=True, slots=True)
class ComparedPart:
    """Of a step, or of memory, in both plans."""

    name: str
    unit: str
    best: float
    rival: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A plan that a person asked about."""

    name: str
    settings: str
    step_s: float
    slower: float
    """Part of the best step by which its own is longer; below zero it is faster."""
    fits: bool
    reason: Reason
    parts: tuple[ComparedPart, ...]

    @property
    def words(self) -> str:
        """What became of it."""
        ahead = self.slower < 0 and self.fits
        return f"{'faster than what was found; ' * ahead}{self.reason.words}"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "name": self.name,
            "settings": self.settings,
            "step_time_s": self.step_s,
            "slower": self.slower,
            "fits": self.fits,
            "reason": self.reason.kind,
            "words": self.words,
            "parts": [asdict(part) for part in self.parts],
        }


def compare(plan: Plan, best: Forecast, problem: Problem) -> Comparison:
    """Forecast a plan by the same model, whether it fits or not, beside the best.

    Args:
        problem: With all chips; the ranks of ``plan`` are numbered over them.
    """
    cast, short = forecast(plan, problem), shortages(plan, problem)
    name = name_of(plan, problem.cluster)
    # Ranks of the best count through the chips that it uses.
    is_best = (name, cast.step_s) == (name_of(best.plan, best.problem.cluster), best.step_s)
    if short:
        worst = short[0]
        needs = f"{worst.key} on {worst.whose.removeprefix('a ')} needs {worst.need_gib:.1f} GiB"
        change = smallest_change(plan, problem)
        words = f"does not fit: {needs} of {worst.room_gib:.1f} that may be planned. {change}"
        reason = Reason("memory", words)
    elif is_best:
        reason = Reason("slower", "it is the plan that was found")
    else:
        reason = verdict(plan, problem, best_s=best.step_s)
        if reason.kind == "slower" and cast.step_s < best.step_s:
            reason = Reason("shape", "the search ended before it came to it")
    return Comparison(
        name=name,
        settings=settings(plan),
        step_s=cast.step_s,
        slower=cast.step_s / best.step_s - 1,
        fits=not short,
        reason=reason,
        parts=tuple(_compared_parts(best, cast)),
    )


def _compared_parts(best: Forecast, other: Forecast) -> Iterator[ComparedPart]:
    """Of the position that works longest, and of the one with least room."""
    names = "computing", "messages inside layers", "waiting for others", "exchange and update"
    for name, *seconds in zip(names, *_seconds(best, other), strict=True):
        kept = (each if each > ROUNDED * best.step_s else 0.0 for each in seconds)
        yield ComparedPart(name, "s", *kept)
    yield ComparedPart("whole step", "s", best.step_s, other.step_s)
    gib = (cast.fullest.memory.total / 2**30 for cast in (best, other))
    yield ComparedPart("fullest rank", "GiB", *gib)
