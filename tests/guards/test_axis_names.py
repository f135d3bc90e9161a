"""An axis is one folder: few files outside it know its name."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from guards.sources import trees

from weft.config.axes import NAMES

LIMIT = 6
SPOKEN = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline parallel"}
FOREIGN = {"TP_SOCKET_IFNAME", "pretraining_tp"}
"""Names that others gave to something else."""


def named(tree: ast.AST, *, manual: bool = False) -> set[str]:
    """What a module names: identifiers, modules, and texts. Docstrings are texts where they are a
    manual, which people read."""
    docs = {id(text) for node in ast.walk(tree) for text in _docstrings(node) if not manual}
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                found.add(text)
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                found.add(text)
            case ast.alias(name=text, asname=str(other)):
                found |= {text, other}
            case ast.alias(name=text) | ast.keyword(arg=str(text)):
                found.add(text)
            case ast.ImportFrom(module=str(text)):
                found.add(text)
            case ast.Constant(value=str(text)) if id(node) not in docs:
                found.add(text)
    return found - FOREIGN


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    if not isinstance(node, CODE):
        return
    for statement in node.body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text


CODE = (ast.Module, ast.FunctionDef, ast.ClassDef)
MANUAL = "weft/config/"
"""The texts under a section's fields are its manual."""


def words(tree: ast.AST, *, manual: bool = False) -> str:
    """All of that as words: ``TensorParallel`` and ``tp_size`` are two each."""
    texts = named(tree, manual=manual)
    apart = (re.sub("([a-z0-9])([A-Z])", r"\1 \2", text) for text in texts)
    return " . ".join(" ".join(re.findall("[a-z0-9]+", text.lower())) for text in apart)


@cache
def texts() -> Mapping[str, str]:
    """The words of every file, by its name."""
    return {name: words(tree, manual=name.startswith(MANUAL)) for name, tree in trees().items()}


def names(tree: ast.AST, axis: str, *, manual: bool = False) -> bool:
    return speaks_of(axis, words(tree, manual=manual))


def speaks_of(axis: str, text: str) -> bool:
    """By its short name or as it is spoken of."""
    return any(re.search(rf"\b{word}(ism)?\b", text) for word in (axis, SPOKEN.get(axis, axis)))


def naming(axis: str) -> set[str]:
    """The files that name an axis, but for its own folders."""
    own = (f"weft/axes/{axis}/", f"weft/parallel/{axis}/")
    return {
        name for name, text in texts().items() if not name.startswith(own) and speaks_of(axis, text)
    }


@pytest.mark.parametrize("axis", [*NAMES, "pp"])
def test_few_files_name_an_axis(axis: str) -> None:
    found = naming(axis)
    assert len(found) <= LIMIT, sorted(found)


def test_every_way_to_name_an_axis_is_seen() -> None:
    codes = ("tp", "x.tp", "f(tp=1)", "mesh.size('tp')", "def f(tp): ...", "lambda *, tp: 0")
    hidden = (
        "'dp tp'.split()",
        "y = f'{x}.mesh.tp'",
        "tp_size = 1",
        "def with_tp(): ...",
        "x = 'pp=2 tp=2'",
    )
    imports = ("import weft.axes.tp.axis", "from weft.parallel.tp import changes", "import x as tp")
    spoken = ("class TensorParallel: ...", "tensor_parallel()", "x = 'less tensor parallelism'")
    manual = ("class Section:\n    'Of dp x tp ranks.'", "class A:\n    x: int\n    'A tp.'")
    for code in (*codes, *hidden, *imports, *spoken):
        assert names(ast.parse(code), "tp"), code
    for code in manual:
        assert names(ast.parse(code), "tp", manual=True), code
        assert not names(ast.parse(code), "tp")
    others = (  # the last is a comment of the code
        "http = 'attp'",
        "x = 'TP_SOCKET_IFNAME'",
        "def f():\n    'Of a tp axis.'",
    )
    assert not any(names(ast.parse(code), "tp") for code in others)
