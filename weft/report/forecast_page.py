"""The page of a plan before it runs: the plan, a step in time, its memory, the next best plans."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from markupsafe import Markup

from weft.planner.explain import pruned_in_words, settings
from weft.planner.forecast import WAITING, Forecast
from weft.planner.outlook import Outlook
from weft.report.html import Table, Tile, render
from weft.report.plan_picture import picture
from weft.simulate.picture import to_svg
from weft.simulate.play import Timeline

MOST_SPANS = 4000
"""Of one timeline; of a longer one the beginning is drawn."""
MOST_TIMELINES = 4
COLOURS = {
    "weights": "#4c78a8",
    "grads": "#72b7b2",
    "optimizer": "#54a24b",
    "activations": "#f58518",
    "working": "#eeca3b",
    "logits": "#e45756",
    "buffers": "#b279a2",
    "fragments": "#9d755d",
    "runtime": "#bab0ac",
}
"""By category of memory."""


def forecast_page(outlook: Outlook, title: str) -> str:
    """One HTML page."""
    found = outlook.found
    return render(
        "forecast.html.j2",
        title=title,
        name=outlook.name,
        tiles=list(_tiles(outlook.forecast)),
        plan=picture(outlook.forecast.plan),
        limits=list(outlook.limits.sentences()),
        advice=outlook.advice,
        timelines=list(_timelines(outlook.forecast)),
        bars=list(_bars(outlook.forecast)),
        colours=COLOURS,
        tables=list(_tables(outlook)),
        searched=[] if found is None else list(pruned_in_words(found)),
    )


def _tiles(cast: Forecast) -> Iterator[Tile]:
    yield Tile("step", f"{cast.step_s:.3g} s")
    yield Tile("tokens a second", f"{cast.tokens_per_s:,.0f}")
    yield Tile("model FLOPs utilization", f"{cast.mfu:.1%}")
    full = cast.fullest
    note = f"of {full.chip.memory_gib:g} GiB of {full.chip.name}"
    yield Tile("fullest memory", f"{full.memory.total / 2**30:.1f} GiB", note)
    yield Tile("sent in a step", f"{sum(cast.sent.values()) / 1e9:,.4g} GB")
    if cast.joules_per_token is not None:
        note = f"assumed: {WAITING:.0%} of the power while chips wait, and what links take"
        yield Tile("energy of a token", f"{cast.joules_per_token:.3g} J", note)
    if cast.price_per_million_tokens is not None:
        yield Tile("a million tokens", f"{cast.price_per_million_tokens:.3g}")


def _timelines(cast: Forecast) -> Iterator[tuple[str, Markup]]:
    """Heading and picture, one of equal pipelines."""
    numbered = list(enumerate(cast.time.timelines))
    runs = [list(run) for _, run in groupby(numbered, key=lambda item: item[1].step_s)]
    for run in runs[:MOST_TIMELINES]:
        (first, timeline), (last, _) = run[0], run[-1]
        name = f"Pipeline {first}" if first == last else f"Pipelines {first} to {last}, each"
        shown = _beginning(timeline)
        part = "" if shown is timeline else f"; the first {shown.step_s:.3g} s are drawn"
        idle = f", {timeline.bubble:.1%} idle" if len(timeline.spans) > 1 else ""
        yield f"{name}: {timeline.step_s:.3g} s{idle}{part}", Markup(to_svg(shown))


def _beginning(timeline: Timeline) -> Timeline:
    """As many actions as a page can hold."""
    ends = sorted(span.end_s for row in timeline.spans for span in row)
    if len(ends) <= MOST_SPANS:
        return timeline
    end = ends[MOST_SPANS]
    rows = (tuple(span for span in row if span.end_s <= end) for row in timeline.spans)
    return Timeline(tuple(rows))


def _bars(cast: Forecast) -> Iterator[tuple[str, list[tuple[str, float]], float]]:
    """What a bar shows, the percent of each category, and that at which the chip's memory ends.

    Neighbouring positions with the same memory share a bar; 100 % is the widest of all.
    """
    widest = max(max(p.chip.memory_gib * 2**30, p.memory.total) for p in cast.positions)
    for _, run in groupby(cast.positions, key=lambda each: (each.chip.name, each.memory.total)):
        members = list(run)
        position = members[0]
        name = position.words
        if len(members) > 1:
            name += f" to {members[-1].words}, {len(members)} equal ones"
        held = f"{position.memory.total / 2**30:.1f} of {position.chip.memory_gib:g} GiB"
        parts = position.memory.by_category().items()
        pieces = [(part, 100 * num_bytes / widest) for part, num_bytes in parts]
        room = 100 * position.chip.memory_gib * 2**30 / widest
        yield f"{name[:1].upper()}{name[1:]}: {held}", pieces, room


def _tables(outlook: Outlook) -> Iterator[Table]:
    cast = outlook.forecast
    if outlook.alternatives:
        rows = [
            (
                f"{other.candidate.name} ({settings(other.candidate.plan)})",
                f"{other.candidate.time.step_s:.3g} s ({other.slower:+.1%})",
                other.words,
            )
            for other in outlook.alternatives
        ]
        headers = ("Plan", "Step", "Why it lost: it ...")
        yield Table(caption="The next best", headers=headers, rows=rows)
    if outlook.helps:
        rows = [(h.change, f"{h.step_s:.3g} s", f"{h.gain:+.1%}") for h in outlook.helps]
        headers = ("With", "Step", "Tokens a second")
        yield Table(caption="What would help", headers=headers, rows=rows, numeric=True)
    if cast.sent:
        places = {"across": "across nodes", "node": "inside nodes"}
        sent = [(way.name, places[way.reach], f"{b / 1e9:,.4g}") for way, b in cast.sent.items()]
        headers = ("What", "Where", "GB")
        yield Table(caption="Sent in one step by all ranks", headers=headers, rows=sent)
