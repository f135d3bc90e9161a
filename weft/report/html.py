"""Pages: each is one file that opens anywhere, without a network, and years later.

All text of a run is untrusted: templates escape it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text; the first cell of each names it."""

    caption: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: bool = False
    """All cells but the first are numbers and line up on the right."""


class Tile(NamedTuple):
    """One number that a reader looks for first."""

    label: str
    value: str
    note: str = ""


def asset(name: str) -> str:
    """The text of a file in ``assets``."""
    return resources.files("weft.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(template: str, *, style: str = "", **values: object) -> str:
    """A page from a template of ``assets``; ``style`` goes before that of all pages."""
    sheet = Markup(style + asset("report.css"))
    return _templates().get_template(template).render(style=sheet, **values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("weft.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["not_recorded"] = NOT_RECORDED
    return environment
