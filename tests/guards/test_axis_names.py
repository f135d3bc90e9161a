"""An axis is one folder: few files outside it know its name."""

import ast
from pathlib import Path

import pytest

from weft.config.axes import NAMES

ROOT = Path(__file__).parents[2]
LIMIT = 6
RUNTIMES = {"tp": "weft/parallel/tensor"}
"""Folders of code that makes modules compute along an axis, where they are not called like it."""


def words(tree: ast.AST) -> set[str]:
    """Every name, attribute, parameter, keyword and text of a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                found.add(word)
            case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
                found.add(word)
    return found


def naming(axis: str) -> set[str]:
    """The files that name an axis, but for its own folders."""
    own = (f"weft/axes/{axis}/", RUNTIMES.get(axis, f"weft/parallel/{axis}") + "/")
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "weft").rglob("*.py")}
    return {
        name
        for name, path in paths.items()
        if not name.startswith(own) and axis in words(ast.parse(path.read_text()))
    }


@pytest.mark.parametrize("axis", [*NAMES, "pp"])
def test_few_files_name_an_axis(axis: str) -> None:
    found = naming(axis)
    assert len(found) <= LIMIT, sorted(found)


def test_every_way_to_name_an_axis_is_seen() -> None:
    codes = ("tp", "x.tp", "f(tp=1)", "mesh.size('tp')", "def f(tp): ...", "lambda *, tp: 0")
    assert all("tp" in words(ast.parse(code)) for code in codes)
    assert "tp" not in words(ast.parse("http = 'a tp axis'; import weft.axes.tp.axis"))
