"""Tables that follow from the code are as the code says."""

import tomllib
from pathlib import Path

import pytest
from docs.pages import PAGES, ROOT, name_of, prose

import weft
from docs import tables


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == tables.rewritten(text), "run: .venv/bin/python docs/tables.py"


def test_every_table_is_shown_once() -> None:
    whole = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [whole.count(f"<!-- begin {name} -->") for name in tables.TABLES] == [1] * len(
        tables.TABLES
    )
    for name, make in tables.TABLES.items():
        assert make().count("\n| ") > 2, name


def test_a_changed_default_would_show() -> None:
    page = ROOT / "docs/configuration.md"
    text = page.read_text(encoding="utf-8")
    assert "| `optim.weight_decay` | `0.1` |" in text
    stale = text.replace("| `optim.weight_decay` | `0.1` |", "| `optim.weight_decay` | `0.2` |")
    assert tables.rewritten(stale) == text


def test_packages_are_those_of_the_import_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    shown = [line for line in tables.packages().splitlines() if line.startswith("| `weft/")]
    assert [line.split("`")[1].strip("/").replace("/", ".") for line in shown] == layers[::-1]
    folders = {path.parent.name for path in (ROOT / "weft").glob("*/__init__.py")}
    assert {layer.removeprefix("weft.") for layer in layers} == folders


def test_changelog_names_the_version() -> None:
    assert weft.__version__ in prose(ROOT / "CHANGELOG.md")
