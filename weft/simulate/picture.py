"""Pictures of a timeline: text for a terminal, SVG for a page."""

from __future__ import annotations

from bisect import bisect_right
from html import escape

from weft.simulate.play import Span, Timeline

COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#76b7b2", "W": "#edc948"}
ROW_HEIGHT = 24


def draw(timeline: Timeline, width: int = 80) -> str:
    """One line a position, one character a moment: F, B, I, W, or a dot where it idles.

    Small letters are the position's later stages.
    """
    step = timeline.step_s
    lines = []
    for number, row in enumerate(timeline.spans):
        first = min((span.action.stage for span in row), default=0)
        moments = [(column + 0.5) * step / width for column in range(width)]
        cells = "".join(_letter(row, moment, first) for moment in moments)
        lines.append(f"{number:>3} {cells}")
    lines.append(f"    {step:.4g} s, {timeline.bubble:.1%} idle")
    return "\n".join(lines)


def _letter(row: tuple[Span, ...], moment: float, first_stage: int) -> str:
    at = bisect_right(row, moment, key=lambda span: span.start_s) - 1
    if at < 0 or row[at].end_s <= moment:
        return "."
    action = row[at].action
    return action.kind if action.stage == first_stage else action.kind.lower()


def to_svg(timeline: Timeline, width: int = 960) -> str:
    """A row of boxes for every position; each says what it is when pointed at."""
    scale = width / (timeline.step_s or 1.0)
    height = ROW_HEIGHT * len(timeline.spans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="Timeline of one step">'
    ]
    for number, row in enumerate(timeline.spans):
        top = number * ROW_HEIGHT + 2
        for span in row:
            action = span.action
            title = escape(f"{action}, {span.start_s:.4g} to {span.end_s:.4g} s")
            parts.append(
                f'<rect x="{span.start_s * scale:.2f}" y="{top}" '
                f'width="{(span.end_s - span.start_s) * scale:.2f}" height="{ROW_HEIGHT - 4}" '
                f'fill="{COLOURS[action.kind]}" stroke="white" stroke-width="0.5">'
                f"<title>{title}</title></rect>"
            )
    return "\n".join([*parts, "</svg>"])
