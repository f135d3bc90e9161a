"""The page of a plan before it runs: the plan, a step in time, its memory, the next best plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from weft.cost.interval import PART
from weft.planner.explain import gap_in_words, pruned_in_words, settings
from weft.planner.forecast import WAITING, Forecast, PositionForecast
from weft.planner.outlook import Outlook
from weft.planner.search import Found
from weft.report.html import Table, Tile, render
from weft.report.plan_picture import picture, ranges
from weft.report.svg import Axis, Bar, Row, Scale, fill_legend, row_chart
from weft.report.timelines import TIME, phase_legend, timeline_rows
from weft.report.units import seconds, sent
from weft.simulate.play import Timeline

MOST_SPANS = 4000
"""Of one timeline; of a longer one the beginning is drawn."""
MOST_TIMELINES = 4
MEMORY = {
    "weights": "fill-0",
    "grads": "fill-1",
    "optimizer": "fill-3",
    "activations": "fill-2",
    "working": "fill-4",
    "logits": "fill-5",
    "buffers": "fill-6",
    "fragments": "fill-7",
    "runtime": "fill-8",
}
"""Look by category."""
PARTS = {
    "compute": "fill-0",
    "communication": "fill-2",
    "exchange and update": "fill-3",
    "idle": "fill-none",
}
"""Look of the parts of a step."""
_LIMIT = ("limit", "memory of the chip")


def forecast_page(outlook: Outlook, title: str) -> str:
    """One HTML page."""
    found, cast = outlook.found, outlook.forecast
    alike = list(_alike(cast))
    of = cast.problem.cluster.pool_of
    chips = {rank: of(rank).chip for p in cast.positions for rank in p.ranks}
    widest = max(max(p.chip.memory_gib, p.memory.total / 2**30) for p in cast.positions)
    return render(
        "forecast.html.j2",
        title=title,
        kind="plan",
        status=(False, "predicted; nothing was run"),
        subtitle=outlook.name,
        tiles=list(_tiles(outlook)),
        plan=picture(cast.plan, chips),
        reasons=[
            *(f"this version cannot run it: {why}" for why in outlook.not_run),
            *outlook.limits.sentences(),
            *(f"try {words}" for words in outlook.advice),
        ],
        searched=list(_searched(found)) if found else [],
        parts=fill_legend((look, part) for part, look in PARTS.items()),
        steps=row_chart(_step_rows(alike), TIME, cast.step_s),
        phases=phase_legend(),
        timelines=list(_timelines(cast)),
        categories=fill_legend([*((look, part) for part, look in MEMORY.items()), _LIMIT]),
        memory=row_chart(_memory_rows(alike), Axis("memory of a rank", "GiB"), widest),
        others=list(_others(outlook)),
        numbers=list(_numbers(outlook, alike)),
    )


def _searched(found: Found) -> Iterator[str]:
    if found.gap is not None:
        yield gap_in_words(found)
    yield from pruned_in_words(found)


def _alike(cast: Forecast) -> Iterator[tuple[str, PositionForecast]]:
    """Positions of all pipelines that do and hold the same, as one: their name, and the first."""
    found: dict[object, list[PositionForecast]] = {}
    for each in cast.positions:
        times = (each.computing_s, each.communicating_s, each.once_s, each.waiting_s)
        key = (each.stages, each.chip.name, len(each.ranks), each.memory.total, times)
        found.setdefault(key, []).append(each)
    for members in found.values():
        name = members[0].words
        if len(members) > 1:
            numbers = ranges([member.pipeline for member in members])
            name = name.replace(f"pipeline {members[0].pipeline}", f"pipelines {numbers}, each", 1)
        yield _capital(name), members[0]


def _capital(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}"


def _tiles(outlook: Outlook) -> Iterator[Tile]:
    cast = outlook.forecast
    low, high = map(seconds, outlook.sureness.step(cast.step_s))
    yield Tile("Step", seconds(cast.step_s), f"{PART:.0%} of such steps: {low} to {high}")
    yield Tile("Throughput", f"{cast.tokens_per_s:,.0f}", "tokens per second")
    yield Tile("MFU", f"{cast.mfu:.1%}", "of the chips' printed peak")
    full = cast.fullest
    note = f"of {full.chip.memory_gib:g} GiB of {full.chip.name}"
    yield Tile("Fullest memory", f"{full.memory.total / 2**30:.1f} GiB", note)
    yield Tile("Sent in a step", sent(sum(cast.sent.values())), "by all ranks")
    if cast.joules_per_token is not None:
        note = f"assumed: {WAITING:.0%} of the power while chips wait, and what links take"
        joules = cast.joules_per_token
        yield Tile("Energy of a token", Scale.of(joules, "J").text(joules, 3), note)
    if cast.price_per_million_tokens is not None:
        yield Tile("Price", f"{cast.price_per_million_tokens:.3g}", "of a million tokens")


def _parts(position: PositionForecast) -> dict[str, float]:
    """Seconds of a step, by what they go to."""
    p = position
    each = (p.computing_s, p.communicating_s, p.once_s, p.waiting_s)
    told = (part if part > 1e-6 * sum(each) else 0.0 for part in each)
    return dict(zip(PARTS, told, strict=True))


def _stacked(parts: dict[str, float], looks: dict[str, str], axis: Axis) -> list[Bar]:
    """Bars from zero on, one after another."""
    bars, start, scale = [], 0.0, Scale.of(sum(parts.values()), axis.unit)
    for part, size in parts.items():
        if size > 0:
            tip = f"{part} {scale.text(size, 3)}"
            bars.append(Bar(start, start + size, looks[part], part, tip))
            start += size
    return bars


def _step_rows(alike: Sequence[tuple[str, PositionForecast]]) -> Iterator[Row]:
    for name, position in alike:
        yield Row(name, _stacked(_parts(position), PARTS, TIME))


def _timelines(cast: Forecast) -> Iterator[tuple[str, Markup]]:
    """Heading and picture, one of equal pipelines."""
    numbered = list(enumerate(cast.time.timelines))
    runs = [list(run) for _, run in groupby(numbered, key=lambda item: item[1].step_s)]
    for run in runs[:MOST_TIMELINES]:
        (first, timeline), (last, _) = run[0], run[-1]
        name = f"Pipeline {first}" if first == last else f"Pipelines {first} to {last}, each"
        end_s = _drawn_s(timeline)
        part = "" if end_s == timeline.step_s else f"; the first {seconds(end_s)} are drawn"
        idle = f", {timeline.bubble:.1%} idle" if timeline.num_positions > 1 else ""
        here = [position.words for position in cast.positions if position.pipeline == first]
        labels = [_capital(words.replace(f" of pipeline {first}", "", 1)) for words in here]
        drawn = row_chart(timeline_rows(timeline, labels, end_s), TIME, end_s)
        yield f"{name}: {seconds(timeline.step_s)}{idle}{part}", drawn


def _drawn_s(timeline: Timeline) -> float:
    """Until then there are as many actions as a page can hold."""
    ends = sorted(span.end_s for row in timeline.spans for span in row)
    return timeline.step_s if len(ends) <= MOST_SPANS else ends[MOST_SPANS]


def _memory_rows(alike: Sequence[tuple[str, PositionForecast]]) -> Iterator[Row]:
    axis = Axis("", "GiB")
    for name, position in alike:
        limit = position.chip.memory_gib
        held = f"{position.memory.total / 2**30:.1f} of {limit:g} GiB"
        sizes = {part: size / 2**30 for part, size in position.memory.by_category().items()}
        yield Row(f"{name}: {held}", _stacked(sizes, MEMORY, axis), limit)


def _others(outlook: Outlook) -> Iterator[Table]:
    """Plans that lost, and what other chips would change."""
    if outlook.alternatives:
        rows = [
            (
                f"{other.candidate.name} ({settings(other.candidate.plan)})",
                f"{seconds(other.candidate.time.step_s)} ({other.slower:+.1%})",
                other.words,
            )
            for other in outlook.alternatives
        ]
        headers = ("Plan", "Step", "Why it lost: it ...")
        yield Table(caption="The next best", headers=headers, rows=rows)
    if outlook.helps:
        rows = [(h.change, seconds(h.step_s), f"{h.gain:+.1%}") for h in outlook.helps]
        headers = ("With", "Step", "Tokens a second")
        yield Table(caption="What would help", headers=headers, rows=rows, numeric=True)


def _numbers(outlook: Outlook, alike: Sequence[tuple[str, PositionForecast]]) -> Iterator[Table]:
    """What the charts show."""
    cast = outlook.forecast
    times = [(name, *map(seconds, _parts(position).values())) for name, position in alike]
    headers = ("Stage", *PARTS)
    yield Table(caption="Time of one step", headers=headers, rows=times, numeric=True)
    held = [(name, position.memory.by_category()) for name, position in alike]
    shown = [part for part in MEMORY if any(sizes.get(part, 0) for _, sizes in held)]
    sizes = [(name, *(f"{of.get(part, 0) / 2**30:.2f}" for part in shown)) for name, of in held]
    headers = ("GiB", *shown)
    yield Table(caption="Memory of a rank", headers=headers, rows=sizes, numeric=True)
    if cast.sent:
        places = {"sites": "across sites", "across": "across nodes", "node": "inside nodes"}
        rows = [(way.name, places[way.reach], sent(b)) for way, b in cast.sent.items()]
        headers = ("What", "Where", "Bytes")
        caption = "Sent in one step by all ranks"
        yield Table(caption=caption, headers=headers, rows=rows, numeric=("Bytes",))
