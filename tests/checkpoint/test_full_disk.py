"""No space, or no leave to write: an error that names the file, and what was there stays."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import cut, save, save_shards
from limits import file_size_limit

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.checkpoint.store import begin, temporary
from weft.checkpoint.verify import verify
from weft.plan.box import Box


def large() -> list[Shard]:
    """4 MB."""
    return [cut("param", "w", torch.ones(1 << 20), Box.whole((1 << 20,)))]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    with file_size_limit(1 << 16), pytest.raises(CheckpointError) as caught:
        save_shards(tmp_path, 2, [large()])
    path = temporary(tmp_path, 2) / "rank-00000.safetensors"
    assert str(caught.value) == f"{path}: cannot be written: File too large"
    assert not path.exists(), "a full disk must get its space back"
    assert open_checkpoint(tmp_path).step == 1
    save_shards(tmp_path, 2, [large()])
    assert open_checkpoint(tmp_path).step == 2


def test_an_index_that_may_not_grow(tmp_path: Path) -> None:
    """The rank files fit, the index does not: the step that was there is untouched."""
    save(tmp_path, 1, seed=1)
    with file_size_limit(900), pytest.raises(CheckpointError, match="cannot be committed: File"):
        save(tmp_path, 1, seed=2)
    assert open_checkpoint(tmp_path).state["seed"] == 1
    assert verify(tmp_path).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small file system here (needs root)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    save(small_disk, 1, seed=1)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device"):
        save_shards(small_disk, 2, [large()])
    assert open_checkpoint(small_disk).step == 1
    save(small_disk, 2, seed=2)
    assert open_checkpoint(small_disk).step == 2


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(CheckpointError, match=r"\.tmp: cannot be created: File exists"):
        begin(tmp_path / "root", 1)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "root")
