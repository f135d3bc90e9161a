"""A report as a tree that tests can ask questions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from weft.report.charts import charts
from weft.report.page import write_report
from weft.report.run_files import read_run

SECTIONS = ["Result", "Training", "Plan", "Samples", "Configuration", "Environment", "Checkpoints"]
VOID = {"meta", "link", "wbr"}


@dataclass
class Element:
    """One element and what lies in it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    pieces: list[str | Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """Every element below with this tag, in order."""
        own = (
            [child, *child.all(tag)] if child.tag == tag else child.all(tag)
            for child in self.children
        )
        return [element for elements in own for element in elements]

    def one(self, tag: str, **attributes: str) -> Element:
        matching = [x for x in self.all(tag) if attributes.items() <= x.attributes.items()]
        assert len(matching) == 1, f"{len(matching)} of <{tag} {attributes}>"
        return matching[0]

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)


class Page(HTMLParser):
    """The tree of a page; refuses elements that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = Element("page", {})
        self._open = [self.root]
        self.feed(html)
        self.close()
        assert self._open == [self.root], f"not closed: {self._open[-1].tag}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        self._open[-1].pieces.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        element = self._open.pop()
        assert element.tag == tag, f"</{tag}> closes <{element.tag}>"

    def handle_data(self, data: str) -> None:
        self._open[-1].pieces.append(data)


def rows(table: Element) -> list[list[str]]:
    return [[cell.text for cell in row.children] for row in table.all("tr")]


def section(page: Element, name: str) -> Element:
    return page.one("section", id=name.lower())


def data_of(run: Path) -> dict[str, dict[str, Any]]:
    """The charts of a run as they are handed to be drawn."""
    files = read_run(run)
    drawn = charts(files.steps, files.evals, {"bigram": 5.25, "unigram": 6.5})
    return {chart.id: asdict(chart) for chart in drawn}


def plots(page: Element) -> dict[str, Element]:
    """The drawn charts by their ids."""
    figures = (x for x in page.all("figure") if x.attributes["id"].startswith("figure-"))
    return {x.attributes["id"].removeprefix("figure-"): x.all("svg")[0] for x in figures}


def everything(element: Element) -> list[Element]:
    return [x for child in element.children for x in [child, *everything(child)]]


def read(run: Path) -> Element:
    page = write_report(run)
    assert page == run / "report.html"
    return Page(page.read_text(encoding="utf-8")).root
