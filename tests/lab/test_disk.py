"""A disk that does not come about leaves the run's checkpoints as they were."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from lab.lab_cases import needs_root

from weft.config.errors import RunError
from weft.lab import disk
from weft.lab.disk import SmallDisk
from weft.lab.identity import Identity

pytestmark = needs_root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints."""
    folder = tmp_path / "checkpoints"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data").write_text(name)
    return folder


def assert_untouched(folder: Path) -> None:
    found = {path.name: (path / "data").read_text() for path in folder.iterdir()}
    assert found == {"one": "one", "two": "two"}
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def test_a_disk_that_is_too_small_for_what_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds one checkpoint of two when it is full."""
    small = SmallDisk(Identity.own(), folder)

    def copy_one(source: Path, target: Path, **_: Any) -> None:
        shutil.copy2(source / "one" / "data", target / "data")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk.shutil, "copytree", copy_one)
        with pytest.raises(OSError, match="No space left"):
            small.mount()
    small.unmount()
    assert_untouched(folder)


def test_a_disk_that_the_kernel_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_WHOLE", "nonsense")
    refused = SmallDisk(Identity.own(), folder)
    with pytest.raises(RunError, match="mount"):
        refused.mount()
    refused.unmount()
    assert_untouched(folder)


def test_a_disk_that_was_used(folder: Path) -> None:
    """What was deleted and what was written on it stays so."""
    used = SmallDisk(Identity.own(), folder)
    used.mount()
    shutil.rmtree(folder / "one")
    (folder / "three").mkdir()
    used.unmount()
    assert {path.name for path in folder.iterdir()} == {"two", "three"}
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]
