"""A timeline as text, for a terminal."""

from __future__ import annotations

from bisect import bisect_right

from weft.simulate.play import Span, Timeline


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
