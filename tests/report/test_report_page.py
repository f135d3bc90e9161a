"""The page of a report: safe, accessible, and whole without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from itertools import combinations
from pathlib import Path

import pytest
from report_cases import CLUSTER, TWO_TO_ONE, change_summary, make_run
from report_page import everything, read, rows, section


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def test_every_table_has_a_caption_and_header_cells(run: Path) -> None:
    for table in read(run).all("table"):
        assert table.one("caption").text
        head = table.one("thead").all("th")
        assert head and all(cell.attributes["scope"] == "col" and cell.text for cell in head)
        for row in table.one("tbody").all("tr"):
            assert row.children[0].attributes["scope"] == "row"
            assert len(row.children) == len(head)


EVIL = "</script></pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_text_of_a_run_is_only_text(run: Path) -> None:
    """Every string that a person, a model or a file brings is shown as it is and never run."""
    (run / "config.yaml").write_text(
        json.dumps({"name": EVIL, EVIL: EVIL, "model": {"family": EVIL, "size": EVIL}})
    )
    (run / "origins.json").write_text(json.dumps({EVIL: EVIL}))
    (run / "plan.json").write_text(TWO_TO_ONE.to_json().replace('"cpu"', json.dumps(EVIL)))
    node = CLUSTER["nodes"][0] | {"host": EVIL, "cpu": EVIL}
    (run / "cluster.json").write_text(json.dumps({"nodes": [node]}))
    change_summary(
        run,
        samples=[{"prompt": EVIL, "text": EVIL}],
        environment={EVIL: EVIL},
        baselines={EVIL: 1.0, "bigram": 5.0},
    )
    page = read(run)
    assert not page.all("script") and not page.all("img")
    assert not any(name.startswith("on") for x in everything(page) for name in x.attributes)
    assert page.one("h1").text == EVIL
    assert section(page, "Samples").one("pre").text == EVIL * 2
    assert rows(section(page, "Configuration").all("table")[0])[2] == [EVIL, EVIL, EVIL]
    assert rows(section(page, "Environment").all("table")[0])[1][:2] == [EVIL, EVIL]
    assert rows(section(page, "Environment").all("table")[1])[1] == [EVIL, EVIL]
    assert rows(section(page, "Plan").one("table"))[1][6] == f"{EVIL} fp32"


def test_text_that_is_no_text_is_replaced(run: Path) -> None:
    """JSON can hold half of a surrogate pair, which no file can."""
    change_summary(run, samples=[{"prompt": "\ud800", "text": "\x00 \x1b[31m \udfff end"}])
    assert section(read(run), "Samples").one("pre").text.endswith(" ? end")


def test_a_problem_is_only_text(run: Path) -> None:
    (run / "metrics.jsonl").write_text(f"{EVIL}\n{EVIL}\n")
    page = read(run)
    assert not page.all("script") and not page.all("img")
    assert "<img src=x" in page.all("section")[0].text


def test_runs_no_script_and_takes_no_style_but_its_own(run: Path) -> None:
    page = read(run)
    (policy,) = (
        meta.attributes["content"]
        for meta in page.all("meta")
        if meta.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digest = base64.b64encode(hashlib.sha256(page.one("style").text.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "img-src": "data:",
    }
    assert not any("style" in x.attributes for x in everything(page))


def test_refers_to_nothing_outside(run: Path) -> None:
    elements = everything(read(run))
    assert not any({"src", "srcset", "action"} & x.attributes.keys() for x in elements)
    targets = {x.attributes["href"] for x in elements if "href" in x.attributes}
    assert {target for target in targets if not target.startswith("#")} == {"data:,"}
    text = (run / "report.html").read_text()
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)


def test_references_within_the_page_have_a_target(run: Path) -> None:
    elements = everything(read(run))
    ids = [x.attributes["id"] for x in elements if "id" in x.attributes]
    assert len(set(ids)) == len(ids)
    links = [x.attributes.get("href", "").removeprefix("#") for x in elements if x.tag == "a"]
    labels = [x.attributes.get("aria-labelledby", "main") for x in elements]
    assert {*links, *labels} <= set(ids)


def schemes() -> list[dict[str, str]]:
    css = resources.files("weft.report").joinpath("assets", "style.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")[:2]
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in (light, dark)]


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


LIGHT = schemes()[0]
"""Has the colours that both share."""
SCHEMES = pytest.mark.parametrize("colors", schemes(), ids=["light", "dark"])


@SCHEMES
def test_text_can_be_read(colors: dict[str, str]) -> None:
    """WCAG AA asks for 4.5."""
    grounds = dict.fromkeys(("text", "muted", "accent"), ("page", "surface"))
    grounds |= {name: (f"{name}-back",) for name in ("good", "open")}
    for text, behind in grounds.items():
        for ground in behind:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    for kind in range(5):
        assert contrast(colors["muted"], colors[f"kind-{kind}"]) >= 4.5
    for fill in range(9):
        colour = LIGHT[f"fill-{fill}"]
        assert contrast("#000000", colour) >= 4.5 and contrast(colour, colors["page"]) >= 3


@SCHEMES
def test_curves_can_be_told_apart_without_colour(colors: dict[str, str]) -> None:
    """WCAG AA asks for 3 against the ground; among each other they differ in lightness."""
    curves = ("chart-main", "chart-second", "chart-level-1", "chart-level-2")
    for curve in curves:
        assert contrast(colors[curve], colors["surface"]) >= 3, curve
    for a, b in combinations(curves, 2):
        assert contrast(colors[a], colors[b]) >= 1.3, (a, b)
