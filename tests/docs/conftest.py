"""A real run for the pages that talk of one: two steps of the recipe ``debug``."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli.main import run

Weft = Callable[..., str]


@pytest.fixture(scope="session")
def weft() -> Weft:
    """Run a command in this process; what it printed on standard output."""

    def call(*arguments: str) -> str:
        printed, wrong = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(wrong):
            code = run(list(arguments))
        assert code == 0, f"weft {' '.join(arguments)}: {wrong.getvalue()}{printed.getvalue()}"
        return printed.getvalue()

    return call


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory, weft: Weft) -> Path:
    """The run folder that the pages call ``runs/mine``."""
    folder = tmp_path_factory.mktemp("example")
    with contextlib.chdir(folder):
        weft("train", "debug", "--out", "runs/mine", "--steps", "2", "--quiet", "--comm-report")
    return folder / "runs" / "mine"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def beside_a_run(here: Path, example: Path) -> Path:
    """The same, with the example as ``runs/mine``."""
    (here / "runs").mkdir()
    (here / "runs" / "mine").symlink_to(example)
    return here
