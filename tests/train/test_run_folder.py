"""A run's folder is held by one command, and is as it was after one that was refused."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from weft.config.errors import ConfigError
from weft.train.run_folder import RunFolder, write_text


def test_what_stays_empty_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with RunFolder(tmp_path / "there/a/b"):
        assert (tmp_path / "there/a/b").is_dir()
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with RunFolder(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir(), "it was there before"


def test_what_was_written_stays(tmp_path: Path) -> None:
    with suppress(ValueError), RunFolder(tmp_path / "a/b") as folder:
        write_text(folder.path / "config.yaml", "name: x\n")
        raise ValueError("a refusal, later on")
    assert (tmp_path / "a/b/config.yaml").read_text() == "name: x\n"
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["config.yaml"]


def test_one_at_a_time(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path / "run"):
            expected = "no other command is working in"
            with pytest.raises(ConfigError, match=expected), RunFolder(tmp_path / "run"):
                pass
            assert (tmp_path / "run").is_dir(), "the second one must not remove it"


def test_logs_are_dropped_only_where_they_are_new(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path / "run") as folder:
            (folder.path / "logs").mkdir()
            (folder.path / "logs/rank1.log").touch()
            folder.drop_new_logs()
        assert not (tmp_path / "run").exists()
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/config.yaml").touch()
    with RunFolder(tmp_path / "run") as folder:
        folder.drop_new_logs()
    assert (tmp_path / "run/logs").is_dir()


def test_a_rank_of_a_launcher_may_have_made_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/rank1.log").touch()
    with RunFolder(tmp_path / "run") as folder:
        folder.drop_new_logs()
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="a folder that can be written"):
        RunFolder(tmp_path / "run").__enter__()


def test_no_folder_is_left_where_one_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="a folder that can be written"):
        RunFolder(tmp_path / "file/a/b").__enter__()
    too_long = tmp_path / "new" / ("x" * 300)
    with pytest.raises(ConfigError, match="a folder that can be written"):
        RunFolder(too_long).__enter__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
