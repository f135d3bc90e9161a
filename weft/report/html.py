"""Pages: each is one file that opens anywhere, without a network, and years later.

All text of a run is untrusted: templates escape it.
"""

from __future__ import annotations

import base64
import hashlib
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
    numeric: bool | tuple[str, ...] = False
    """All cells but the first, or those under these headers, are numbers: they line up on the
    right."""


class Tile(NamedTuple):
    """One number that a reader looks for first."""

    label: str
    value: str
    note: str = ""


def render(template: str, *, title: str, kind: str, **values: object) -> str:
    """A page from a template of ``assets``: what its heading is, and what such pages are called.

    The pages run no script, and their content security policy takes no style but their own sheet.
    """
    return _templates().get_template(template).render(title=title, kind=kind, **values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("weft.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    file = resources.files("weft.report").joinpath("assets", "style.css")
    style = file.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment.globals |= {
        "not_recorded": NOT_RECORDED,
        "style": Markup(style),
        "style_digest": Markup(f"sha256-{digest}"),
        "status": None,
        "subtitle": "",
    }
    return environment
