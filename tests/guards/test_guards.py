"""The rules of the house, kept by machines: style, types, imports, budgets, dead code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from guards import budget

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

COMMANDS = {
    "ruff": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--no-cache", "--check", "."],
    "mypy": ["mypy"],
    "imports": ["lint-imports", "--no-cache"],
    "dead code": ["vulture"],
    "dependencies": ["deptry", "weft", "--no-ansi"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_finds_nothing(name: str) -> None:
    program, *arguments = COMMANDS[name]
    run = subprocess.run(
        [BIN / program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_code_keeps_its_budgets() -> None:
    assert not budget.check(ROOT / "weft")


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = 1\n" * 601, "lines in a file"),
        ("def f():\n" + "    x = 1\n" * 80, "lines in a function"),
        ("def f(a, b, c, d, e, g, h, *, i, j): ...\n", "parameters"),
        ("def f():\n if a:\n  for b in c:\n   while d:\n    with e:\n     pass\n", "nesting"),
        ("def f():\n" + "    if a: pass\n" * 12, "branches"),
        ("def f():\n    global x\n", "global statement"),
        ("from os import *\n", "star import"),
        ("try:\n    pass\nexcept:\n    pass\n", "bare except"),
        ("getattr(a, 'b')\n", "getattr and the like per 1000 lines"),
        (
            "class A: ...\nclass B(A): ...\nclass C(B): ...\nclass D(C): ...\n",
            "levels of own classes above",
        ),
        ("".join(f"x{i} = {i}\n" for i in range(12)) * 2, "repeated lines"),
    ],
)
def test_each_budget_can_be_exceeded(tmp_path: Path, code: str, what: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert what in {excess.what for excess in budget.check(tmp_path)}


def test_torch_is_not_imported_by_what_plans_and_commands_need() -> None:
    modules = ["weft", "weft.cli.main", "weft.train.resolve", "weft.data.prepare", "weft.plan.plan"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def code_of(path: Path) -> list[str]:
    """A module's statements without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"torch\.cuda", ["weft/platform/cuda.py"]),
        (r"\bpickle(?!=False)", []),
        (r"torch\.load", []),
        (r"(?<![.\w])(eval|exec)\(", []),
    ],
)
def test_words_that_stay_where_they_belong(pattern: str, allowed: list[str]) -> None:
    for path in sorted((ROOT / "weft").rglob("*.py")):
        if str(path.relative_to(ROOT)) not in allowed:
            found = [line for line in code_of(path) if re.search(pattern, line)]
            assert not found, (path, found)
