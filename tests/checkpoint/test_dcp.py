"""To and from ``torch.distributed.checkpoint``, which reads and writes its own format itself."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from checkpoint_cases import save, values
from torch.distributed import checkpoint as dcp

from weft.checkpoint.dcp import METADATA, from_dcp, to_dcp
from weft.checkpoint.diff import differences
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_there_and_back(tmp_path: Path) -> None:
    """``dcp.load`` gives what was saved; what it was made of comes back with all that it said."""
    before = open_checkpoint(save(tmp_path / "weft", 3, seed=3))
    assert to_dcp(before, tmp_path / "dcp").num_tensors == 4
    expected = values(3)
    state = {
        "model": {name: torch.empty(before.shape(name)) for name in before.names()},
        "optim": {
            "state": {name: {"exp_avg": torch.empty(before.shape(name))} for name in before.names()}
        },
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, expected["param", name])
        assert torch.equal(state["optim"]["state"][name]["exp_avg"], expected["exp_avg", name])
    from_dcp(tmp_path / "dcp", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert (back.step, list(differences(before, back))) == (3, [])


def test_what_others_saved(tmp_path: Path) -> None:
    """Without a word of Weft in it; what is no tensor is named, and never unpickled."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    moments = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    state = {"model": model.state_dict(), "optim": {"state": moments}, "loader": {"note": {1, 2}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    made = from_dcp(tmp_path / "dcp", tmp_path / "run/checkpoints")
    assert made.left_out == ["loader.note"]
    checkpoint = open_checkpoint(tmp_path / "run")
    assert (checkpoint.step, checkpoint.state["updates"]) == (0, 1)
    assert checkpoint.kinds == ["exp_avg", "exp_avg_sq", "param"]
    for name, moment in moments.items():
        assert torch.equal(checkpoint.read(name), model.state_dict()[name])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(checkpoint.read(name, kind), moment[kind])
    to_dcp(checkpoint, tmp_path / "again")
    from_dcp(tmp_path / "again", tmp_path / "twice")
    assert list(differences(checkpoint, open_checkpoint(tmp_path / "twice"))) == []
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        from_dcp(tmp_path / "dcp", tmp_path / "twice")


class _Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_something(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    (folder / METADATA).write_bytes(pickle.dumps(_Runs(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointError, match=r"is not unpickled: it asks for (posix|os)\.mkdir"):
        from_dcp(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_a_file_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    data = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"names a file elsewhere: \.\./\.\./secret"):
        from_dcp(folder, tmp_path / "run")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "weft", 3, seed=3)
    arguments = ["checkpoint", "convert", str(tmp_path / "weft"), str(tmp_path / "dcp")]
    assert run([*arguments, "--to", "dcp", "--json"]) == 0
    told = {"place": str(tmp_path / "dcp"), "num_tensors": 4, "left_out": []}
    assert json.loads(capsys.readouterr().out) == told
    assert run([*arguments, "--to", "dcp"]) == 2
    assert "expected a folder that is new or empty" in capsys.readouterr().err
    assert run(["checkpoint", "convert", arguments[3], str(tmp_path / "run"), "--to", "weft"]) == 0
    assert run(["checkpoint", "diff", str(tmp_path / "run"), arguments[2]]) == 0
