"""Committing, naming the latest, pruning, clearing up, and opening what is there."""

import time
from pathlib import Path

import pytest
import torch
from checkpoint_cases import SHAPES, cut, rank_shards, save, save_shards, values

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard, write_rank
from weft.checkpoint.store import begin, candidates, commit, prune, read_latest, temporary
from weft.checkpoint.verify import verify
from weft.plan.box import Box


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def vector(start: int, size: int, length: int = 8, kind: str = "param") -> Shard:
    return cut(kind, "w", torch.arange(float(length)), Box((start,), (size,)))


def test_a_save_leaves_a_checkpoint_and_its_name(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    folder = save(root, 100, seed=1)
    assert names(root) == ["latest", "step-00000100"]
    assert names(folder) == ["index.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert (root / "latest").read_text() == "step-00000100\n"


REFUSALS = {
    "hole": ([[vector(0, 3)], [vector(5, 3)]], "no file holds Box(offset=(3,), size=(2,))"),
    "overlap": (
        [[vector(0, 5)], [vector(4, 4)]],
        "Box(offset=(4,), size=(1,)) is stored more than once",
    ),
    "hole and overlap": (
        [[vector(0, 5)], [vector(4, 2)]],
        "no file holds Box(offset=(6,), size=(2,)); "
        "param/w: Box(offset=(4,), size=(1,)) is stored more than once",
    ),
    "twice": ([[vector(0, 8)], [vector(0, 8)]], "is stored more than once"),
    "shapes": ([[vector(0, 8)], [vector(0, 0, 9)]], "ranks disagree: F32 (8,) and F32 (9,)"),
    "dtypes": (
        [[vector(0, 4)], [cut("param", "w", torch.arange(8), Box((4,), (4,)))]],
        "ranks disagree: F32 (8,) and I64 (8,)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_commit_refuses_what_is_not_stored_exactly_once(case: str, tmp_path: Path) -> None:
    """And the checkpoint that was there stays the latest, whole."""
    save(tmp_path, 1, seed=1)
    ranks, words = REFUSALS[case]
    with pytest.raises(CheckpointError) as caught:
        save_shards(tmp_path, 1, ranks)
    assert words in str(caught.value) and "param/w" in str(caught.value)
    assert open_checkpoint(tmp_path).state["seed"] == 1
    assert verify(tmp_path).ok


def test_commit_refuses_a_file_that_is_not_in_the_folder(tmp_path: Path) -> None:
    """As when every machine wrote to a disk of its own."""
    begin(tmp_path, 1)
    shards = rank_shards(1)
    files = [write_rank(temporary(tmp_path, 1), 0, shards[0])]
    files += [write_rank(tmp_path / "elsewhere", 1, shards[1])]
    with pytest.raises(CheckpointError) as caught:
        commit(tmp_path, 1, files, {})
    path = temporary(tmp_path, 1) / "rank-00001.safetensors"
    assert str(caught.value) == f"{path}: is missing. Do all machines see the same folder there?"


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_state_that_is_not_json_replaces_nothing(value: object, tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    with pytest.raises((ValueError, TypeError)):
        save_shards(tmp_path, 1, rank_shards(2), {"value": value})
    assert open_checkpoint(tmp_path).state["seed"] == 1


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    save(tmp_path, 1, seed=2)
    assert names(tmp_path) == ["latest", "step-00000001"]
    stored = open_checkpoint(tmp_path).read("norm.weight")
    assert torch.equal(stored, values(2)["param", "norm.weight"])


def test_prune_keeps_the_last_saved_and_the_latest(tmp_path: Path) -> None:
    """Going back to step 2 and saving 3 again: 3 is newer than 4 and 5 then."""
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, seed=step)
    save(tmp_path, 3, seed=33)
    assert prune(tmp_path, keep=2) == ["step-00000001", "step-00000002", "step-00000004"]
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000005"]
    (tmp_path / "latest").write_text("step-00000005\n")
    assert prune(tmp_path, keep=1) == []
    assert open_checkpoint(tmp_path).step == 5


def test_prune_keeps_the_last_saved_where_a_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours, after step 2, and ten minutes more before step 5."""
    real = time.time
    for step, ahead_s in enumerate((7200, 7200, 0, 0, -600), start=1):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real() + ahead_s)
        save(tmp_path, step, seed=step)
        prune(tmp_path, keep=2)
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    (tmp_path / "latest").unlink()
    assert open_checkpoint(tmp_path).step == 5


def test_prune_leaves_damaged_ones_and_does_not_count_them(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    assert prune(tmp_path, keep=1) == ["step-00000001"]
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]


def test_begin_clears_leftovers_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    for name in ("step-00000002.tmp", "step-00000003.old.tmp", "mine.tmp", "step-1.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "latest.tmp").touch()
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old")
    assert begin(tmp_path, 2) == temporary(tmp_path, 2)
    assert list(temporary(tmp_path, 2).iterdir()) == []
    expected = ["latest", "mine.tmp", "step-00000001", "step-00000002.tmp", "step-1.tmp"]
    assert names(tmp_path) == expected


LATEST = {
    "missing": (None, "latest names no checkpoint"),
    "dangling": ("step-00000009", "latest names no checkpoint"),
    "empty": ("", "latest names no checkpoint"),
    "leads out": ("../step-00000001", "latest names no checkpoint"),
    "binary": ("\x00\ud800", "latest names no checkpoint"),
    "damaged": ("step-00000003", "step-00000003/rank-00000.safetensors: is missing"),
}


@pytest.mark.parametrize("case", LATEST)
def test_a_latest_that_is_no_use_falls_back_and_says_so(case: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    text, words = LATEST[case]
    (tmp_path / "latest").unlink()
    if text is not None:
        (tmp_path / "latest").write_bytes(text.encode(errors="surrogatepass"))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.step == 2
    assert len(checkpoint.notes) == 1 and words in checkpoint.notes[0]
    assert checkpoint.notes[0].endswith("; opened step-00000002, which is complete.")


def test_latest_wins_over_newer_ones(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, seed=step)
    (tmp_path / "latest").write_text("step-00000001")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.notes) == (1, ())


def test_a_named_checkpoint_is_never_replaced_by_another(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, seed=step)
    (tmp_path / "step-00000002" / "index.json").unlink()
    assert open_checkpoint(tmp_path / "step-00000001").step == 1
    with pytest.raises(CheckpointError, match=r"step-00000002/index.json: is missing"):
        open_checkpoint(tmp_path / "step-00000002")


def test_a_run_folder_opens_its_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 4, seed=1)
    assert open_checkpoint(tmp_path).step == 4
    assert verify(tmp_path).files == 2


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "no")
    with pytest.raises(CheckpointError, match="no complete checkpoint here"):
        open_checkpoint(tmp_path)
    assert candidates(tmp_path) == [] and read_latest(tmp_path) is None


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    for step in (10**8, 99_999_999):
        save(tmp_path, step, seed=1)
    assert [folder.name for folder in candidates(tmp_path)] == ["step-99999999", "step-100000000"]


READS = {
    "unknown name": ("x", "param", None, "param/x: is not stored"),
    "unknown kind": ("norm.weight", "momentum", None, "momentum/norm.weight: is not stored"),
    "outside": (
        "norm.weight",
        "param",
        Box((4,), (5,)),
        "param/norm.weight[4:9]: lies outside the stored shape (8,)",
    ),
    "another rank": (
        "norm.weight",
        "param",
        Box((0, 0), (1, 1)),
        "param/norm.weight[0:1,0:1]: lies outside the stored shape (8,)",
    ),
}


@pytest.mark.parametrize("case", READS)
def test_reading_what_is_not_there(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1, seed=1)
    name, kind, box, words = READS[case]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).read(name, kind, box)
    assert str(caught.value) == f"{folder}: {words}"
    with pytest.raises(CheckpointError, match="is not stored"):
        open_checkpoint(tmp_path).shape("x")


def test_require_wants_every_moment_unless_told(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    checkpoint = open_checkpoint(tmp_path)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    assert checkpoint.require(SHAPES, ("param", "exp_avg")) == []
    expected = "exp_avg_sq/embed.weight, exp_avg_sq/norm.weight are not stored"
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.require(SHAPES, kinds)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.require(SHAPES, kinds, allow_missing=("exp_avg",))
    started_afresh = checkpoint.require(SHAPES, kinds, allow_missing=("exp_avg_sq",))
    assert started_afresh == ["exp_avg_sq/embed.weight", "exp_avg_sq/norm.weight"]


WANTS = {
    "more": ({**SHAPES, "head.weight": (2, 2)}, "param/head.weight is not stored"),
    "less": ({"norm.weight": (8,)}, "param/embed.weight is stored, but the model has no such"),
    "shape": (
        {**SHAPES, "norm.weight": (9,)},
        "param/norm.weight: stored with shape (8,), the model has (9,)",
    ),
}


@pytest.mark.parametrize("case", WANTS)
def test_require_refuses_another_model(case: str, tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    shapes, words = WANTS[case]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).require(shapes, ("param",))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape", "box"),
    [
        ("param", (4,), Box((2,), (4,))),
        ("param", (4, 4), Box((0,), (4,))),
        ("param", (4,), Box((0,), (3,))),
        ("a/b", (4,), Box((0,), (4,))),
    ],
)
def test_a_shard_that_contradicts_itself_is_our_mistake(
    kind: str, shape: tuple[int, ...], box: Box
) -> None:
    with pytest.raises(AssertionError):
        Shard("w", kind, shape, box, torch.zeros(4))
