"""What the pages quote exists: links, files, tests, names, keys of the configuration."""

import ast
import itertools
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from docs.pages import PAGES, ROOT, anchors, links, name_of, prose, quoted

import weft
from weft.config.schema import root

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)

FILES = re.compile(r"(weft|tests|docs|examples|benchmarks)/[\w./-]*")
SUFFIXES = ("json", "jsonl", "yaml", "py", "html", "txt", "md", "log", "safetensors", "toml")
IDENTIFIER = re.compile(r"(\w+\.)*(\w*[a-z]\w*[A-Z]\w*|[A-Z]\w*[a-z]\w*|\w+\(\))")
"""CamelCase, or a call without arguments."""


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path), link


@every_page
def test_files_exist(page: Path) -> None:
    for words in quoted(page):
        path = words.partition("::")[0]
        if FILES.fullmatch(path):
            pattern = re.sub(r"\bNAME\b", "*", path)
            assert list(ROOT.glob(pattern)), words


@every_page
def test_tests_exist(page: Path) -> None:
    for words in quoted(page):
        path, found, function = words.partition("::")
        if found:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            assert function in names, words


@every_page
def test_keys_of_the_configuration_exist(page: Path) -> None:
    for words in quoted(page):
        key = re.split(r"[=: ]", words)[0]
        section, dot, leaf = key.partition(".")
        if dot and section in root().fields and leaf.rpartition(".")[2] not in SUFFIXES:
            assert _node(key) is not None, words


def _node(key: str) -> object:
    node = root()
    for part in key.split("."):
        name, bracket, _ = part.partition("[")
        child = node.child(name)
        if child is None:
            return None
        node = child.items if bracket and child.items is not None else child
    return node


@cache
def _source() -> str:
    files = [*(ROOT / "weft").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@every_page
def test_names_occur_in_the_code(page: Path) -> None:
    for words in quoted(page):
        if IDENTIFIER.fullmatch(words):
            for part in words.removesuffix("()").split("."):
                assert re.search(rf"\b{part}\b", _source()), words


@every_page
def test_dotted_names_can_be_found(page: Path) -> None:
    for words in quoted(page):
        if re.fullmatch(r"weft(\.\w+)+", words) and not words.endswith(SUFFIXES):
            path = ROOT / words.replace(".", "/")
            holder, leaf = path.parent, path.name
            text = (
                holder / "__init__.py" if holder.is_dir() else holder.with_suffix(".py")
            ).read_text()
            assert path.exists() or path.with_suffix(".py").exists() or leaf in text, words


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = sorted(_leaves(contents["nav"]))
    there = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert listed == sorted(there)


def _leaves(entries: list[dict[str, object]]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        for value in entry.values():
            found += _leaves(value) if isinstance(value, list) else [str(value)]
    return found


@every_page
def test_has_one_title_and_no_skipped_level(page: Path) -> None:
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.MULTILINE)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_every_invariant_names_code_and_tests() -> None:
    sections = prose(ROOT / "docs/invariants.md").split("\n## ")[1:]
    assert [section[0] for section in sections] == list("1234567")
    for section in sections:
        assert "- In `weft/" in section, section
        assert "- Tests: `tests/" in section, section


def test_the_reference_shows_what_there_is() -> None:
    """Every name of the API page can be imported, and whatever `import weft` offers is on it."""
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    shown = []
    for name in names:
        module, _, leaf = name.rpartition(".")
        shown.append(vars(import_module(module))[leaf])
    offered = [getattr(weft, name) for name in weft.__all__ if not name.startswith("_")]
    assert len(names) > 20 and all(each in shown for each in offered)
    assert all(each.__doc__ for each in shown)
