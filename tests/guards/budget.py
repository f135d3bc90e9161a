"""Budgets of the code, measured on its syntax trees. Limits are on the worst case: tails matter."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 80
PARAMETERS = 8
NESTING = 3
BRANCHES = 12
OWN_BASES = 2
DYNAMIC_PER_1000_LINES = 1.5
REPEATED_PART = 0.01
BLOCK = 12
"""Lines that count as a repeated block when they occur twice."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


@dataclass(frozen=True)
class Excess:
    """One value above its limit."""

    where: str
    what: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.value:g}, limit {self.limit:g}"


def check(root: Path) -> list[Excess]:
    """Everything below ``root`` that is over a limit."""
    sources = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    found = [excess for path, tree in trees.items() for excess in _file(path, tree, sources[path])]
    found += _inheritance(trees)
    lines = sum(text.count("\n") for text in sources.values())
    dynamic = sum(_dynamic(tree) for tree in trees.values()) / lines * 1000
    what = "getattr and the like per 1000 lines"
    found += _over(str(root), what, dynamic, DYNAMIC_PER_1000_LINES)
    found += _over(str(root), "repeated lines", _repeated(sources) / lines, REPEATED_PART)
    return found


def _over(where: str, what: str, value: float, limit: float) -> list[Excess]:
    return [Excess(where, what, value, limit)] if value > limit else []


def _file(path: Path, tree: ast.Module, text: str) -> Iterator[Excess]:
    yield from _over(str(path), "lines in a file", text.count("\n"), FILE_LINES)
    for node in ast.walk(tree):
        where = f"{path}:{node.lineno}" if isinstance(node, ast.stmt | ast.ExceptHandler) else ""
        if isinstance(node, ast.Global):
            yield Excess(where, "global statement", 1, 0)
        elif isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            yield Excess(where, "star import", 1, 0)
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield Excess(where, "bare except", 1, 0)
        elif isinstance(node, Function):
            yield from _function(f"{where} {node.name}", node)


def _function(where: str, node: Function) -> Iterator[Excess]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [a for a in arguments if a.arg not in ("self", "cls")]
    yield from _over(where, "lines in a function", length, FUNCTION_LINES)
    yield from _over(where, "parameters", len(named), PARAMETERS)
    yield from _over(where, "nesting", _nesting(node), NESTING)
    yield from _over(where, "branches", _branches(node), BRANCHES)


def _nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and child in node.orelse
        inner = depth + (isinstance(child, _BLOCKS) and not is_elif)
        deepest = max(deepest, _nesting(child, inner))
    return deepest


def _branches(node: Function) -> int:
    kinds = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)
    branches = 1
    for child in ast.walk(node):
        branches += isinstance(child, (*kinds, ast.Assert))
        branches += len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0
    return branches


def _dynamic(tree: ast.Module) -> int:
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    names = [f.id for f in calls if isinstance(f, ast.Name)]
    return sum(name in ("getattr", "hasattr", "setattr") for name in names)


def _inheritance(trees: Mapping[Path, ast.Module]) -> Iterator[Excess]:
    """Levels of our own classes above each class, by name."""
    bases: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)]
                places[node.name] = f"{path}:{node.lineno} {node.name}"

    def levels(name: str) -> int:
        own = [base for base in bases.get(name, []) if base in bases and base != name]
        return max((1 + levels(base) for base in own), default=0)

    for name, where in places.items():
        yield from _over(where, "levels of own classes above", levels(name), OWN_BASES)


def _repeated(sources: Mapping[Path, str]) -> int:
    """Lines inside a block of ``BLOCK`` lines that occurs more than once; imports apart."""
    blocks: Counter[tuple[str, ...]] = Counter()
    per_file = {}
    for path, text in sources.items():
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith(("import ", "from "))]
        per_file[path] = lines
        blocks.update(tuple(lines[i : i + BLOCK]) for i in range(len(lines) - BLOCK + 1))
    repeated = 0
    for lines in per_file.values():
        inside = set()
        for i in range(len(lines) - BLOCK + 1):
            if blocks[tuple(lines[i : i + BLOCK])] > 1:
                inside.update(range(i, i + BLOCK))
        repeated += len(inside)
    return repeated
