"""The rules of the house, kept by machines: style, types, imports, budgets, dead code."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from guards import budget
from guards.sources import ROOT, trees

BIN = Path(sys.executable).parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text()

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
    if name == "mypy" and f"torch=={version('torch').partition('+')[0]}\n" not in CONSTRAINTS:
        arguments.append("--no-warn-unused-ignores")  # other releases have other stubs
    run = subprocess.run(
        [BIN / program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
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
    modules = [
        "weft",
        "weft.cli.main",
        "weft.resolve.resolve",
        "weft.data.prepare",
        "weft.plan.plan",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def uses(tree: ast.Module) -> set[str]:
    """Modules imported, functions called by their bare name, and dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(f"{node.func.id}()")
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found.add(f"{node.arg}={node.value.value}")
    return found


BANNED = {"pickle", "marshal", "shelve", "dill", "torch.load", "eval()", "exec()"}
BANNED |= {"allow_pickle=True", "torch.cuda"}
ALLOWED = {("torch.cuda", "weft/platform/cuda.py")}
ALLOWED |= {("pickle", "weft/checkpoint/dcp.py")}  # the metadata of DCP; see UNPICKLER
UNPICKLER = {"pickle.BUILD", "pickle.UnpicklingError", "pickle._Unpickler"}


def test_words_that_stay_where_they_belong() -> None:
    """No code or objects out of data files; one file that knows CUDA."""
    for name, tree in trees().items():
        for word in BANNED & uses(tree):
            assert (word, name) in ALLOWED, f"{name} uses {word}"


def test_pickles_are_read_by_an_unpickler_that_refuses() -> None:
    """Where PyTorch's own files are pickles: only by a class that names what it admits."""
    for _, file in sorted(ALLOWED & {("pickle", name) for _, name in ALLOWED}):
        tree = trees()[file]
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert {name for name in names if name.startswith("pickle.")} <= UNPICKLER
        assert not any(
            isinstance(n, ast.ImportFrom) and n.module == "pickle" for n in ast.walk(tree)
        )


def test_banned_words_are_seen() -> None:
    code = "import pickle\neval(x)\ntorch.load(f)\nnp.load(f, allow_pickle=True)\ntorch.cuda.x"
    assert len(BANNED & uses(ast.parse(code))) == 5


@pytest.mark.parametrize("name", ["Gradients", "Executor"])
def test_ranks_are_put_together_in_one_place(name: str) -> None:
    """Whatever is trained, ``assemble`` makes its gradient path and its executor."""
    calls = [
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    assert calls == ["weft/train/assemble.py"]


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
