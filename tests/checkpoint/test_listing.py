"""What ``ls`` and ``show`` tell agrees with what was saved."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoint_cases import SHAPES, cut, rank_shards, save, save_shards

import weft
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.listing import KindFacts, describe, list_checkpoints
from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

PLAN = Plan(
    num_layers=2,
    pipelines=tuple(
        PipelinePlan(
            stages=(StagePlan(mesh=Mesh.of(ranks, dp=len(ranks)), layers=(0, 2)),),
            samples=8,
            microbatch=4,
        )
        for ranks in (range(1), range(1, 3))
    ),
)


def test_list(tmp_path: Path) -> None:
    start = time.time()
    save_shards(tmp_path, 1, rank_shards(1), {"plan": json.loads(PLAN.to_json())})
    save(tmp_path, 2, seed=2)
    save(tmp_path, 10, seed=3)
    (tmp_path / "step-00000002" / "index.json").unlink()
    first, second, third = list_checkpoints(tmp_path)
    assert [row.step for row in (first, second, third)] == [1, 2, 10]
    assert [row.latest for row in (first, second, third)] == [False, False, True]
    assert [row.complete for row in (first, second, third)] == [True, False, True]
    assert second.problem == f"{tmp_path}/step-00000002/index.json: is missing"
    assert (first.world_size, third.world_size) == (3, None)
    assert (first.num_tensors, first.num_params) == (4, 6 * 8 + 8)
    assert first.bytes == sum(p.stat().st_size for p in first.folder.glob("rank-*"))
    assert start <= first.saved_at <= third.saved_at <= time.time()


def test_list_of_a_run_and_of_nothing(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    save(tmp_path / "checkpoints", 1, seed=1)
    assert len(list_checkpoints(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="no such folder"):
        list_checkpoints(tmp_path / "no")


@pytest.mark.parametrize("plan", ["text", 3, {}, {"pipelines": [{"stages": 1}]}, [1], True])
def test_a_plan_that_is_none_is_no_reason_to_fail(plan: object, tmp_path: Path) -> None:
    save_shards(tmp_path, 1, rank_shards(1), {"plan": plan})
    assert list_checkpoints(tmp_path)[0].world_size is None


def test_describe(tmp_path: Path) -> None:
    half = cut("master", "norm.weight", torch.ones(8, dtype=torch.bfloat16), Box.whole((8,)))
    ranks = rank_shards(1)
    save_shards(tmp_path, 5, [[*ranks[0], half], ranks[1]], {"seed": 4})
    shown = describe(open_checkpoint(tmp_path))
    assert shown.weft == weft.__version__ and shown.state == {"seed": 4}
    assert shown.shapes == SHAPES
    assert shown.listed == list_checkpoints(tmp_path)[0]
    whole = {"num_tensors": 2, "num_elements": 56, "bytes": 224, "dtypes": ("F32",)}
    assert shown.kinds == (
        KindFacts(kind="exp_avg", **whole),
        KindFacts(kind="master", num_tensors=1, num_elements=8, bytes=16, dtypes=("BF16",)),
        KindFacts(kind="param", **whole),
    )
    assert json.dumps(asdict(shown), default=str)


def test_brackets_in_a_problem_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short path, that a narrow table holds
    folder = Path("[/red]")
    save(folder, 1, seed=1)
    (folder / "step-00000001/index.json").write_text("[/b] [bold]")
    assert run(["checkpoint", "ls", str(folder)]) == 0
    assert "[/red]" in "".join(capsys.readouterr().out.split())
