"""Two checkpoints are compared by what they hold, whatever files hold it."""

import math
from pathlib import Path

import pytest
import torch
from checkpoint_cases import KINDS, SHAPES, STATE, cut, rank_shards, save, save_shards, values

from weft.checkpoint.diff import differences
from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run
from weft.plan.box import Box


def whole(seed: int, **changed: torch.Tensor) -> list[list]:
    """The values of ``rank_shards``, held by one rank; some replaced."""
    tensors = values(seed) | {("param", name): tensor for name, tensor in changed.items()}
    return [[cut(k, n, t, Box.whole(tuple(t.shape))) for (k, n), t in tensors.items()]]


def found(first: Path, second: Path) -> dict[str, str]:
    pair = open_checkpoint(first), open_checkpoint(second)
    return {each.what: each.problem for each in differences(*pair)}


def test_the_same_values_cut_otherwise_are_equal(tmp_path: Path) -> None:
    save_shards(tmp_path / "a", 1, rank_shards(3))
    save_shards(tmp_path / "b", 1, whole(3), {**STATE, "plan": "another"})
    assert found(tmp_path / "a", tmp_path / "b") == {}
    assert run(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_every_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = values(3)["param", "embed.weight"].clone()
    tensor[2, 5] += 0.5
    tensor[4, 1] = math.nan
    save_shards(tmp_path / "a", 1, rank_shards(3))
    changed = {"embed.weight": tensor, "norm.weight": torch.zeros(9), "new": torch.zeros(1)}
    save_shards(tmp_path / "b", 1, whole(3, **changed), {**STATE, "seed": 8})
    at = values(3)["param", "embed.weight"][2, 5].double().item()
    assert found(tmp_path / "a", tmp_path / "b") == {
        "state/seed": "7 and 8",
        "param/embed.weight": "2 of 48 elements, some no numbers in one alone; "
        f"the first at [2, 5]: {at!r} and {tensor[2, 5].double().item()!r}",
        "param/norm.weight": "shape (8,) and (9,)",
        "param/new": "only in the second",
    }
    assert run(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    assert '"equal": false' in capsys.readouterr().out


def test_dtypes_and_what_is_no_number(tmp_path: Path) -> None:
    """Numbers that both are none are alike; numbers stored in another dtype are told."""
    same = torch.tensor([1.0, math.nan, math.inf, -0.0])
    save_shards(tmp_path / "a", 1, whole(3, x=same, y=same))
    save_shards(tmp_path / "b", 1, whole(3, x=same.clone(), y=same.bfloat16()))
    expected = {"param/y": "float32 and bfloat16: the same numbers"}
    assert found(tmp_path / "a", tmp_path / "b") == expected


def test_of_a_run_the_latest_is_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step, seed=step)
    first = tmp_path / "checkpoints/step-00000001"
    names = {f"{kind}/{name}" for kind in KINDS for name in SHAPES}
    assert found(first, tmp_path).keys() == names | {"state/seed"}
