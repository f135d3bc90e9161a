"""A plan and what to expect of it, as people read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from weft.cli.output import aligned, out
from weft.cluster.view import ClusterView
from weft.config.axes import UNLIKE
from weft.cost.interval import PART
from weft.plan.plan import PipelinePlan, Plan
from weft.planner.explain import NO_GAIN, Comparison, gap_in_words, pruned_in_words, settings
from weft.planner.forecast import JOULES_PER_BYTE, WAITING, PositionForecast, PositionMemory
from weft.planner.naming import elsewhere
from weft.planner.outlook import Outlook
from weft.planner.search.found import ENDED_EARLY
from weft.recompute.asked import in_short
from weft.report.plan_picture import head_in_words, layers_held, ranges
from weft.report.units import count, seconds, sent, some
from weft.resolve.resolve import Resolved
from weft.simulate.picture import draw

MOST_ROWS = 24
MOST_HELPS = 3
"""Changes that are named in short."""
_REACH = {"node": "inside nodes", "across": "between nodes", "sites": "between sites"}
_CATEGORIES = ("weights", "grads", "optimizer", "activations", "working", "logits")
_ALWAYS = ("pipeline", "stage", "ranks", "layers", "samples", "micro-batches", "computes")


def show_plan(resolved: Resolved) -> None:
    """The plan as people read it."""
    config, plan = resolved.config, resolved.plan
    tokens = plan.global_batch * config.data.seq_len
    out.print(
        f"[bold]{config.model.label}[/]: "
        f"{count(resolved.num_parameters)} parameters, {plan.num_layers} layers; "
        f"{some(plan.global_batch, 'sample')} = {tokens} tokens a step; {config.train.steps} steps",
        markup=True,
    )
    heading, *lines = plan_table(plan)
    lines += [] if config.sites is None else [f"  {config.sites.in_words}"]
    print_plan(heading, [*lines, *(f"  {note}" for note in resolved.notes)])


def print_plan(heading: str, lines: Iterable[str]) -> None:
    """The heading of a table of stages, its lines, and what is to be said of them."""
    out.print(heading, style="dim")
    out.print(*lines, sep="\n")


def plan_table(plan: Plan) -> Iterator[str]:
    """One line a stage, below a heading; columns that say nothing are left out."""
    rows = list(_rows(plan))
    columns = zip(rows[0], *(row.values() for row in rows), strict=True)
    kept = [column for column in columns if column[0] in _ALWAYS or any(column[1:])]
    yield from aligned(list(zip(*kept, strict=True)), words=len(kept))
    if plan.domains:
        sets = (f"ranks {ranges(domain, dash='-')}" for domain in plan.domains)
        yield f"domains: {' | '.join(sets)}; summed and divided inside each, then between them"
    if plan.sums:
        yield f"sums between domains cast to {plan.sums}, so numbers depend on domains"
    if plan.sites:
        sets = (f"ranks {ranges(site, dash='-')}" for site in plan.sites)
        yield f"sites: {' | '.join(sets)}; each trains for itself, so numbers depend on this plan"
    for cast, borders in plan.casts.items():
        where = _stages(plan, borders)
        yield f"borders cast to {cast}: after {where}, so numbers depend on where"
    for cast, stages in plan.expert_casts.items():
        where = _stages(plan, stages)
        yield f"tokens to experts cast to {cast}: {where}, so numbers depend on that"


def _stages(plan: Plan, numbers: Sequence[tuple[int, int]]) -> str:
    several = len(plan.pipelines) > 1
    return ", ".join(f"pipeline {p} stage {s}" if several else f"stage {s}" for p, s in numbers)


def _rows(plan: Plan) -> Iterator[dict[str, str]]:
    """Column -> text; what holds for a whole pipeline stands beside its first stage."""
    for p, s, stage in plan.stages():
        pipeline = plan.pipelines[p]
        share = f"{pipeline.samples}"
        if len(plan.pipelines) > 1:
            share += f" ({pipeline.samples / plan.global_batch:.0%})"
        extras = [stage.device, stage.precision]
        if stage.layers[1] > stage.layers[0]:
            extras += in_short(stage.recompute)
            extras += ["compiled"] if stage.compile else []
        extras += elsewhere(stage)
        row = {
            "pipeline": str(p),
            "stage": str(s),
            "ranks": ranges(stage.mesh.ranks, dash="-"),
            "mesh": " x ".join(f"{axis} {size}" for axis, size in stage.mesh.axes if size > 1),
            "layers": _layers_held(pipeline, s),
            "samples": share,
            "micro-batches": f"{pipeline.num_microbatches} x {pipeline.microbatch}",
            "schedule": pipeline.order,
            "zero": str(stage.zero) if stage.zero else "",
            "passes": _several(stage.passes),
            "pieces": _several(stage.pieces),
            "head ways": _several(stage.head_ways),
            "scores": stage.scores.removeprefix("blocks"),
            "expert ways": str(stage.expert_ways or ""),
            "expert pieces": _several(stage.expert_pieces),
            **{
                f"{entry.divides}s by": " : ".join(map(str, stage.mesh.shares(entry.name)))
                for entry in UNLIKE
            },
            "samples by": " : ".join(map(str, stage.sample_shares)),
            "keeps": " : ".join(map(str, stage.state_shares)),
            "computes": " ".join(extras),
        }
        if s:
            row |= dict.fromkeys(("pipeline", "samples", "micro-batches", "schedule"), "")
        yield row


def _several(many: int) -> str:
    return str(many) if many > 1 else ""


def _layers_held(pipeline: PipelinePlan, number: int) -> str:
    """``0-2``; with several stages also the embedding and the head, as ``3 + head``."""
    stage = pipeline.stages[number]
    layers = [", ".join(layers_held(stage.layers, dash="-"))] if stage.blocks else []
    if len(pipeline.stages) == 1:
        return layers[0]
    head = [head_in_words(stage, dash="-")] * pipeline.computes(number, "head")
    return " + ".join([*["embed"] * (number == 0), *layers, *head]) or "none"


def in_words(outlook: Outlook) -> Iterator[str]:
    """Time, memory, traffic, energy and price; what limits the plan."""
    cast = outlook.forecast
    yield (
        f"predicted: {seconds(cast.step_s)} a step, {count(cast.tokens_per_s)} tokens/s, "
        f"MFU {cast.mfu:.1%}"
    )
    yield from _how_sure(outlook)
    yield from folded(list(memory_table(cast.positions)))
    if cast.sent:
        parts = [
            f"{way.name} {sent(num_bytes)} ({_REACH[way.reach]})"
            for way, num_bytes in sorted(cast.sent.items(), key=lambda item: -item[1])
        ]
        yield f"sent in a step by all ranks: {', '.join(parts)}"
    apart = "" if outlook.apart is None else outlook.apart.words
    yield from filter(None, (apart, outlook.domains, outlook.cuts))
    yield from _energy_and_price(outlook)
    yield "what limits it:"
    yield from (f"  {sentence}" for sentence in outlook.limits.sentences())
    yield from (f"  try {words}" for words in outlook.advice)


def _how_sure(outlook: Outlook) -> Iterator[str]:
    """The intervals of time and memory, and why they are as wide."""
    cast, sure = outlook.forecast, outlook.sureness
    low, high = sure.step(cast.step_s)
    gib = [num_bytes / 2**30 for num_bytes in sure.memory(cast.fullest.memory.total)]
    yield (
        f"  {PART:.0%} of such steps take {seconds(low)} to {seconds(high)}, and the fullest rank "
        f"{gib[0]:.3g} to {gib[1]:.3g} GiB: {sure.words}"
    )
    if outlook.surer:
        yield f"  {outlook.surer}"
    if outlook.found and outlook.found.gap is not None:
        yield f"  {gap_in_words(outlook.found)}"
    if outlook.found and outlook.found.is_cut_short:
        yield f"  {ENDED_EARLY}"


def _energy_and_price(outlook: Outlook) -> Iterator[str]:
    """What each token costs; where only some chips' values are known, what is missing."""
    cast = outlook.forecast
    powers = {chip.name: chip.power_w for p in cast.positions for chip, _, _ in p.kinds}
    prices = {pool.chip.name: pool.price_per_hour for pool in outlook.cluster.pools}
    if cast.joules_per_token is not None:
        node, across = (JOULES_PER_BYTE[reach] / 8 * 1e12 for reach in ("node", "across"))
        yield (
            f"energy: {cast.joules_per_token:.3g} J a token; assumed: {WAITING:.0%} of the power "
            f"while chips wait, {node:g} and {across:g} pJ a bit sent inside and between nodes; "
            "hosts and cooling are left out"
        )
    elif any(powers.values()):
        yield f"energy: not known, for {_lacking(powers)} has no power_w"
    if cast.price_per_million_tokens is not None:
        yield f"price: {cast.price_per_million_tokens:.3g} for a million tokens"
    elif any(price is not None for price in prices.values()):
        yield f"price: not known, for {_lacking(prices)} has no price_per_hour"


def _lacking(values: Mapping[str, float | None]) -> str:
    return ", ".join(name for name, value in values.items() if value is None)


def why_in_words(outlook: Outlook) -> Iterator[str]:
    """The next best plans, the search, and what other chips would bring."""
    if outlook.found is None:
        yield "a plan that was given has no alternatives; leave the plan to the planner for those"
        return
    if outlook.forecast.plan.sites:
        yield "each site was planned by itself"
    else:
        none = "no next best plan: all others that fit differ in settings alone or were ruled out"
        yield "the next best plans:" if outlook.alternatives else none
    for number, other in enumerate(outlook.alternatives, 1):
        made = other.candidate
        yield f"  {number}. {other.slower:+.1%}: {made.name} ({settings(made.plan)})"
        yield f"     it {other.words}"
    yield "the search:"
    yield from (f"  {line}" for line in pruned_in_words(outlook.found))
    if outlook.helps:
        yield "what would help:"
        yield from (f"  {each.words}" for each in outlook.helps)
    slowest = outlook.limits.slowest.pipeline
    timeline = outlook.forecast.time.timelines[slowest]
    if 1 < timeline.num_positions <= MOST_ROWS:
        yield f"one step of pipeline {slowest}, small letters are later stages of a mesh:"
        yield from draw(timeline).splitlines()
    yield from summary_in_words(outlook)


def summary_in_words(outlook: Outlook) -> Iterator[str]:
    """What limits the plan, what would help most for its price, and how sure all that is, in at
    most ten lines."""
    yield "in short:"
    yield from (f"  {sentence}" for sentence in list(outlook.limits.sentences())[:2])
    helps = [each for each in outlook.helps if each.gain >= NO_GAIN]
    if outlook.helps and not helps:
        yield f"  nothing would help of {', '.join(each.change for each in outlook.helps)}"
    for each in sorted(helps, key=lambda each: each.pays, reverse=True)[:MOST_HELPS]:
        yield f"  {each.words}"
    yield from _how_sure(outlook)


def cluster_in_words(cluster: ClusterView) -> str:
    """``500 x 8 H100-SXM5-80GB, 2 x 8 A100-SXM4-80GB``, with sites, where they are."""
    pools: Counter[tuple[str, int, str]] = Counter()
    for pool in cluster.pools:
        place = f" at {pool.site.name}" if pool.site else ""
        pools[pool.chip.name, pool.chips_per_node, place] += pool.num_nodes
    return ", ".join(
        f"{nodes} x {chips} {name}{place}" for (name, chips, place), nodes in pools.items()
    )


def memory_table(positions: Sequence[PositionMemory | PositionForecast]) -> Iterator[str]:
    """Memory of a rank of every mesh, GiB; equal neighbours share a row."""
    largest = max(position.memory.total for position in positions) / 2**30
    decimals = 1 if largest >= 10 else 2 if largest >= 1 else 3
    rows: list[tuple[str, ...]] = [
        ("pipeline", "stage", "ranks", "GiB", "of", *_CATEGORIES, "other")
    ]
    for (chip, figures), same in groupby(positions, key=_figures):
        equal = list(same)
        pipelines = ranges(sorted({position.pipeline for position in equal}), dash="-")
        stages = ranges(sorted({s for position in equal for s in position.stages}), dash="-")
        rows.append((pipelines, stages, chip, *(f"{figure:.{decimals}f}" for figure in figures)))
    return aligned(rows, words=3)


def _figures(position: PositionMemory | PositionForecast) -> tuple[str, tuple[float, ...]]:
    """How many of which chip, and GiB of each."""
    parts = position.memory.by_category()
    named = [parts[name] / 2**30 for name in _CATEGORIES]
    total = position.memory.total / 2**30
    return position.chips, (total, position.chip.memory_gib, *named, total - sum(named))


def folded(lines: Sequence[str], most: int = MOST_ROWS) -> Iterator[str]:
    """The lines; of very many the first and the last."""
    if len(lines) <= most:
        yield from lines
        return
    head = most * 2 // 3
    tail = most - head - 1
    yield from lines[:head]
    yield f"... {len(lines) - head - tail} more; --json has them all"
    yield from lines[-tail:]


def comparison(compared: Comparison) -> Iterator[str]:
    """By how much a user's plan is slower, why, and in which part of a step."""
    yield f"why not {compared.name} ({compared.settings})?"
    longer = _longer(compared.slower)
    if compared.fits:
        yield f"  a step takes {longer}: {compared.words}"
    else:
        yield f"  {compared.words}"
        yield f"  with enough memory, a step would take {longer}"
    rows = [
        (f"{p.name}, {p.unit}", f"{p.best:.4g}", f"{p.rival:.4g}", f"{p.rival - p.best:+.3g}")
        for p in compared.parts
    ]
    yield from (f"  {line}" for line in aligned([("", "best", "this", ""), *rows], words=1))


def _longer(slower: float) -> str:
    """``30.8% longer``."""
    if abs(slower) < 5e-4:
        return "as long"
    return f"{abs(slower):.1%} {'longer' if slower > 0 else 'less time'}"
