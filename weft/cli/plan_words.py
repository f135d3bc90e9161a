"""An outlook as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.cli.output import count, out
from weft.cluster.view import ClusterView
from weft.planner.explain import pruned_in_words, settings
from weft.planner.forecast import Forecast, PositionForecast
from weft.planner.outlook import Outlook
from weft.simulate.picture import draw

MOST_ROWS = 24
_CATEGORIES = ("weights", "grads", "optimizer", "activations", "working", "logits")


def show_outlook(outlook: Outlook, *, explain: bool) -> None:
    """What to expect, and with ``explain`` why."""
    for line in in_words(outlook):
        out.print(line, markup=False)
    if explain:
        for line in why_in_words(outlook):
            out.print(line, markup=False)


def in_words(outlook: Outlook) -> Iterator[str]:
    """Time, memory, traffic, energy and price; what limits the plan."""
    cast = outlook.forecast
    yield (
        f"predicted: {seconds(cast.step_s)} a step, {count(cast.tokens_per_s)} tokens/s, "
        f"MFU {cast.mfu:.1%}"
    )
    yield from folded(list(memory_table(cast)))
    if cast.sent:
        parts = [
            f"{way.name} {num_bytes / 1e9:,.3g} ({_reach(way.reach)})"
            for way, num_bytes in sorted(cast.sent.items(), key=lambda item: -item[1])
        ]
        yield f"sent in a step, GB: {', '.join(parts)}"
    if cast.joules_per_token is not None:
        yield f"energy: {cast.joules_per_token:.3g} J a token, hosts and cooling left out"
    if cast.price_per_million_tokens is not None:
        yield f"price: {cast.price_per_million_tokens:.3g} for a million tokens"
    yield "what limits it:"
    yield from (f"  {sentence}" for sentence in outlook.limits.sentences())
    yield from (f"  try {words}" for words in outlook.advice)


def why_in_words(outlook: Outlook) -> Iterator[str]:
    """The next best plans, the search, and what other chips would bring."""
    if outlook.found is None:
        yield "a plan that was given has no alternatives; leave the plan to the planner for those"
        return
    yield "the next best plans:" if outlook.alternatives else "no other plan fits"
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
    if 1 < len(timeline.spans) <= MOST_ROWS:
        yield f"one step of pipeline {slowest}, small letters are later stages of a mesh:"
        yield from draw(timeline).splitlines()


def cluster_in_words(cluster: ClusterView) -> str:
    """``500 x 8 H100-SXM5-80GB, 2 x 8 A100-SXM4-80GB``."""
    pools: dict[tuple[str, int], int] = {}
    for pool in cluster.pools:
        key = pool.chip.name, pool.chips_per_node
        pools[key] = pools.get(key, 0) + pool.num_nodes
    return ", ".join(f"{nodes} x {chips} {name}" for (name, chips), nodes in pools.items())


def memory_table(cast: Forecast) -> Iterator[str]:
    """Memory of a rank of every mesh; neighbours that are alike share a row."""
    rows: list[tuple[str, ...]] = [("meshes", "chip", "GiB", "of", *_CATEGORIES, "other")]
    alike: list[list[PositionForecast]] = []
    for position in cast.positions:
        if alike and _cells(alike[-1][0]) == _cells(position):
            alike[-1].append(position)
        else:
            alike.append([position])
    number = 0
    for group in alike:
        last = number + len(group) - 1
        name = f"{number}" if last == number else f"{number}-{last}"
        rows.append((name, *_cells(group[0])))
        number = last + 1
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join((first, *rest)).rstrip()


def _cells(position: PositionForecast) -> tuple[str, ...]:
    parts = position.memory.by_category()
    named = [parts[name] / 2**30 for name in _CATEGORIES]
    total = position.memory.total / 2**30
    figures = [total, position.chip.memory_gib, *named, total - sum(named)]
    chip = f"{len(position.ranks)} x {position.chip.name}"
    return chip, *(_short(figure) for figure in figures)


def _short(figure: float) -> str:
    """Three digits, and nothing below a hundredth."""
    return f"{figure:.0f}" if figure >= 99.95 else f"{float(f'{figure:.3g}'):.2f}"


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


def seconds(number: float) -> str:
    """``12.3 s`` or ``4.56 ms``."""
    return f"{number:.3g} s" if number >= 1 else f"{number * 1e3:.3g} ms"


def _reach(reach: str) -> str:
    return "inside nodes" if reach == "node" else "between nodes"
