"""What to expect of a plan, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from weft.cli.output import out
from weft.cluster.view import ClusterView
from weft.cost.energy import JOULES_PER_BYTE, WAITING
from weft.planner.explain import pruned_in_words, settings
from weft.planner.forecast import Forecast, PositionForecast
from weft.planner.outlook import Outlook
from weft.report.plan_picture import ranges
from weft.report.units import count, seconds, sent
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
            f"{way.name} {sent(num_bytes)} ({_reach(way.reach)})"
            for way, num_bytes in sorted(cast.sent.items(), key=lambda item: -item[1])
        ]
        yield f"sent in a step by all ranks: {', '.join(parts)}"
    yield from _energy_and_price(outlook)
    yield "what limits it:"
    yield from (f"  {sentence}" for sentence in outlook.limits.sentences())
    yield from (f"  try {words}" for words in outlook.advice)


def _energy_and_price(outlook: Outlook) -> Iterator[str]:
    """What each token costs; where only some chips' values are known, what is missing."""
    cast = outlook.forecast
    powers = {p.chip.name: p.chip.power_w for p in cast.positions}
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
    """Memory of a rank of every mesh, GiB; equal neighbours share a row."""
    groups = [list(same) for _, same in groupby(cast.positions, key=_figures)]
    decimals = _decimals(max(position.memory.total for position in cast.positions) / 2**30)
    heading = ("pipeline", "stage", "ranks", "GiB", "of", *_CATEGORIES, "other")
    rows = [heading, *(_memory_row(positions, decimals) for positions in groups)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = list(zip(row, widths, strict=True))
        words = [f"{cell:<{width}}" for cell, width in cells[:_NUM_WORDS]]
        numbers = [f"{cell:>{width}}" for cell, width in cells[_NUM_WORDS:]]
        yield "  ".join((*words, *numbers))


def _memory_row(equal: Sequence[PositionForecast], decimals: int) -> tuple[str, ...]:
    chip, figures = _figures(equal[0])
    return (
        ranges(sorted({position.pipeline for position in equal}), dash="-"),
        ranges(sorted({stage for position in equal for stage in position.stages}), dash="-"),
        chip,
        *(f"{figure:.{decimals}f}" for figure in figures),
    )


_NUM_WORDS = 3
"""Columns of a memory table that hold no numbers."""


def _figures(position: PositionForecast) -> tuple[str, tuple[float, ...]]:
    """How many of which chip, and GiB of each."""
    parts = position.memory.by_category()
    named = [parts[name] / 2**30 for name in _CATEGORIES]
    total = position.memory.total / 2**30
    chip = f"{len(position.ranks)} x {position.chip.name}"
    return chip, (total, position.chip.memory_gib, *named, total - sum(named))


def _decimals(largest: float) -> int:
    """Three digits of the largest number of a table, or about that."""
    return 1 if largest >= 10 else 2 if largest >= 1 else 3


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


def _reach(reach: str) -> str:
    return "inside nodes" if reach == "node" else "between nodes"
