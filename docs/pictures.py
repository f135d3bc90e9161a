"""Pictures of the pages: a plan as ``weft plan --html`` draws it, and a step with orders beside one
another.

``python -m docs.pictures`` plans and draws them anew, which takes some seconds. Tests compare.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weft.cli.lab_virtual import virtual_chips
from weft.cli.main import run
from weft.simulate.play import Timeline

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "mixed-plan.svg"
PLAN = (
    "plan demo model.size=llama3-70b data.seq_len=8192 batch.samples=256 "
    "--cluster examples/clusters/three-vendors.yaml"
)
"""The command of the README."""
_ALONE = "svg.plan { font: 13px system-ui, sans-serif; min-width: 0; background: var(--page); }"
"""What the page around it gives the picture there."""


def standalone(page: str) -> str:
    """The plan of a page as a picture of its own, with the colours of the page."""
    found = re.search(r'<svg class="plan".*?</svg>', page, re.DOTALL)
    sheet = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert found and sheet, "a page of `weft plan --html`"
    style = f"<style><![CDATA[\n{sheet[1].strip()}\n{_ALONE}\n]]></style>"
    svg = found[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = svg.partition(">")
    return f"{head}>\n{style}{rest}\n"


TIMELINES = ROOT / "docs" / "slow-border.svg"
BORDER = ROOT / "examples/clusters/slow-border.yaml"
STAGES = (
    "plan.stages=[{layers: 2}, {layers: 1}]",
    "batch.samples=32",
    "batch.micro=2",
    "compute.precision=fp32",
)
"""Of the tutorial on mixing."""
ORDERS = {"1f1b": "1F1B", "made": "an order made for these stages, this border and this memory"}
_GFLOPS = 50.0
"""As ``weft lab --predict`` has them where nothing else is said."""
_WIDTH, _LANE, _LEFT = 960, 26, 70
_LOOKS = {"F": ("#4c78a8", "forward"), "B": ("#e39c37", "backward")}
_LOOKS |= {"I": ("#f2c14e", "backward of inputs"), "W": ("#8f6bb3", "backward of weights")}


def timelines() -> str:
    """One step of two stages under each order, on one scale of time."""
    played: dict[str, Timeline] = {}
    for name, words in ORDERS.items():
        asked = ["weft", "train", "debug", *STAGES, f"plan.schedule={name}"]
        (timeline,) = virtual_chips(BORDER, asked, (), _GFLOPS).predict().pipelines
        played[f"{words}: {timeline.step_s:.3f} s a step, {timeline.bubble:.0%} idle"] = timeline
    longest = max(timeline.step_s for timeline in played.values())
    lines, top = [], 0
    for words, timeline in played.items():
        lines += [
            f'<text x="0" y="{top + 18}">{words}</text>',
            *_lanes(timeline, top + 28, longest),
        ]
        top += 28 + _LANE * len(timeline.spans) + 12
    kinds = {span.action.kind for each in played.values() for row in each.spans for span in row}
    at = 0
    for colour, words in dict.fromkeys(_LOOKS[kind] for kind in sorted(kinds)):
        lines.append(f'<rect x="{at}" y="{top + 4}" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{at + 20}" y="{top + 16}">{words}</text>')
        at += 40 + 8 * len(words)
    size = f'width="{_WIDTH}" height="{top + 24}" viewBox="0 0 {_WIDTH} {top + 24}"'
    style = 'font-family="system-ui, sans-serif" font-size="14" fill="#222"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    page = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([begin, page, *lines, "</svg>"]) + "\n"


def _lanes(timeline: Timeline, top: int, longest: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT) / longest
    for number, row in enumerate(timeline.spans):
        y = top + number * _LANE
        yield f'<text x="0" y="{y + 16}">stage {number}</text>'
        for start, end, action in ((span.start_s, span.end_s, span.action) for span in row):
            x, width = _LEFT + start * scale, max((end - start) * scale - 0.6, 0.4)
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 6}"'
            yield f'<rect {box} fill="{_LOOKS[action.kind][0]}"><title>{action}</title></rect>'


def main() -> None:
    """Plan, draw, write."""
    TIMELINES.write_text(timelines(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        assert run([*PLAN.split(), "--html", str(page)]) == 0
        PICTURE.write_text(standalone(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (PICTURE, TIMELINES):
        sys.stdout.write(f"{path.relative_to(ROOT)}: written\n")


if __name__ == "__main__":
    main()
