"""A save that is killed at any moment leaves the previous checkpoint or the new one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType

import pytest
import torch
from checkpoint_cases import KINDS, SHAPES, save, values
from kill_saves import SCENARIOS

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.store import complete
from weft.checkpoint.verify import verify

HERE = Path(__file__).parent


def opened(root: Path) -> tuple[int, int] | None:
    """(step, seed) of what opens, after comparing every element; None if nothing does."""
    if not complete(root):
        with pytest.raises(CheckpointError, match="no complete checkpoint here"):
            open_checkpoint(root)
        return None
    checkpoint = open_checkpoint(root)
    seed = checkpoint.state["seed"]
    for (kind, name), whole in values(seed).items():
        assert torch.equal(checkpoint.read(name, kind), whole)
    assert verify(checkpoint.folder).ok
    assert {kind: checkpoint.names(kind) for kind in KINDS} == {k: list(SHAPES) for k in KINDS}
    return checkpoint.step, seed


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What every kill left, in memory where there is one: no disk would keep more of it."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("killed")
    with tempfile.TemporaryDirectory(dir=parent, prefix="weft-test-") as folder:
        subprocess.run(
            [sys.executable, str(HERE / "kill_saves.py"), folder],
            check=True,
            timeout=1200,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        yield Path(folder)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call(scenario: str, killed: Path) -> None:
    """SIGKILL before each call that touches the disk; then open, save again and look around."""
    before, (step, seed, keep) = SCENARIOS[scenario]
    previous, new = (before[-1] if before else None), (step, seed)
    left = sorted((killed / scenario).iterdir())
    found = [opened(root) for root in left]
    switch = found.index(new)
    assert found == [previous] * switch + [new] * (len(left) - switch)
    assert 7 < switch < len(left) - 1, f"killed {switch} times before and {len(left)} in all"
    for root in left:
        save(root, 9, 19, keep=keep)
        assert opened(root) == (9, 19)
        assert verify(root).ok, verify(root).problems
        strangers = [p.name for p in root.iterdir() if p.name != "latest" and p.suffix]
        assert strangers == [], "a later save must clear what killed ones left"
        assert len(list(root.glob("step-*"))) <= keep


def calls_of(save_once: Callable[[], object]) -> list[str]:
    """The calls that order what reaches the disk, as they happen; writes in a row count once."""
    seen: list[str] = []

    def watch(_frame: object, event: str, called: object) -> None:
        if event != "c_call" or not isinstance(called, BuiltinFunctionType):
            return
        name = called.__name__
        again = name == "write" and seen[-1:] == ["write"]
        if name in {"write", "fsync", "rename", "replace"} and not again:
            seen.append(name)

    old = sys.getprofile()
    sys.setprofile(watch)
    try:
        save_once()
    finally:
        sys.setprofile(old)
    return seen


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    """A power cut keeps renames in any order with writes, unless each is synced in turn."""
    rank_file = ["write", "fsync"]
    index = ["write", "fsync", "fsync"]  # the file, then its folder
    name = ["rename", "fsync"]
    latest = ["write", "fsync", "replace", "fsync"]
    calls = calls_of(lambda: save(tmp_path, 1, seed=1))
    assert calls == [*rank_file, *rank_file, *index, *name, *latest]
