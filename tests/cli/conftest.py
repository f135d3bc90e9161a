"""One tiny run that was never stopped, for every test to look at or to compare with."""

from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
from cli import commands
from resolve import profiles

from weft.cli.main import run
from weft.comm.launchers import LAUNCHERS
from weft.platform.detect import detect_node


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``whole_run("fp32")`` is the folder of tiny.yaml trained to its end. Not to be changed.

    It was predicted from a made-up profile of this machine. Every checkpoint is there: of those
    that are written beside training a busy machine leaves some out.
    """

    @cache
    def make(precision: str) -> Path:
        folder = tmp_path_factory.mktemp(f"whole-{precision}")
        commands.write_inputs(folder)
        profiles.save(folder / "profiles", detect_node())
        arguments = ["train", "tiny.yaml", "--out", "run", "--quiet"]
        arguments += ["checkpoint.asynchronous=false"]
        with chdir(folder), pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEFT_PROFILES", str(folder / "profiles"))
            assert run([*arguments, f"compute.precision={precision}"]) == 0
        return folder / "run"

    return make


@pytest.fixture
def finished(whole_run: Callable[..., Path]) -> Path:
    """A run folder that holds a finished run. Not to be changed."""
    return whole_run("fp32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty but for tiny.yaml and text.txt. No launcher started us."""
    ranks = [launcher.rank for launcher in LAUNCHERS]
    for name in (*ranks, "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    commands.write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
