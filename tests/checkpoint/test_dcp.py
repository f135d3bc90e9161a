"""To and from ``torch.distributed.checkpoint``, which reads and writes its own format itself."""

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from checkpoint_cases import KINDS, SHAPES, cut, save, save_shards, values
from limits import file_size_limit
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from weft.checkpoint.dcp import (
    METADATA,
    _compare,
    _read,
    _Reader,
    _unpickled,
    from_dcp,
    to_dcp,
)
from weft.checkpoint.diff import differences
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.cli.main import run
from weft.plan.box import Box

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


def test_kinds_with_a_dot_come_back(tmp_path: Path) -> None:
    """Those of sites: ``site0.param`` of a parameter is not ``param`` of its ``site0``."""
    kinds = [(k, k.replace("exp_avg", "site0.param")) for k in KINDS]
    whole = {(kind, n): values(3)[own, n] for own, kind in kinds for n in SHAPES}
    shards = [cut(kind, n, t, Box.whole(tuple(t.shape))) for (kind, n), t in whole.items()]
    before = open_checkpoint(save_shards(tmp_path / "weft", 3, [shards]))
    to_dcp(before, tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert sorted(back.kinds) == ["param", "site0.param"]
    assert list(differences(before, back)) == []


def test_nothing_is_left_of_what_has_no_room(tmp_path: Path) -> None:
    one = Shard("w", "param", (1 << 20,), Box.whole((1 << 20,)), torch.ones(1 << 20))
    before = open_checkpoint(save_shards(tmp_path / "weft", 3, [[one]]))
    there = tmp_path / "there"
    there.mkdir()
    for folder in (tmp_path / "new", there):
        expected = r"cannot be written; it needs 4 MB on the disk|cannot be written: File too large"
        with file_size_limit(1 << 16), pytest.raises(CheckpointError, match=expected) as caught:
            to_dcp(before, folder)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    assert not [*there.iterdir()]


def test_what_is_no_number_is_what_was_written(tmp_path: Path) -> None:
    written = {"model.a": torch.tensor([1.0, torch.nan, -0.0])}
    dcp.save(written, checkpoint_id=tmp_path, no_dist=True)
    _compare(tmp_path, written)
    with pytest.raises(CheckpointError, match=r"model\.a: is not what was written"):
        _compare(tmp_path, {"model.a": torch.tensor([1.0, torch.nan, 0.0])})


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


class _Of:
    """Unpickled, what some object calls by a name."""

    def __init__(self, owner: object, name: str) -> None:
        self.asks = owner, name

    def __reduce__(self) -> tuple:
        return getattr, self.asks


def test_what_an_older_python_writes_of_an_enumeration(tmp_path: Path) -> None:
    """3.11.0 to 3.11.3, among them Debian's; what else would be asked for so is refused."""
    (tmp_path / "own").write_bytes(pickle.dumps(_Of(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    with pytest.raises(CheckpointError, match=r"is a _MEM_FORMAT_ENCODING$"):
        _unpickled(tmp_path / "own")
    others = {
        "__class__": _MEM_FORMAT_ENCODING,
        "mro": _MEM_FORMAT_ENCODING,
        "fromkeys": OrderedDict,
        "_storage_meta": Metadata,
    }
    for name, owner in others.items():
        (tmp_path / name).write_bytes(pickle.dumps(_Of(owner, name)))
        with pytest.raises(CheckpointError, match=f"is not unpickled: it asks for '{name}' of <"):
            _unpickled(tmp_path / name)


def _part(value: object) -> bytes:
    """What makes a value, inside a longer pickle."""
    return pickle.dumps(value, 3)[2:-1]


def test_a_pickle_that_says_something_else_the_second_time(tmp_path: Path) -> None:
    """It changes a class, so that an entry that was a tensor becomes one to be unpickled."""
    folder, ran = tmp_path / "dcp", tmp_path / "ran"
    dcp.save({"model": {"a": _Runs(str(ran))}}, checkpoint_id=folder, no_dist=True)
    shown = tmp_path / "shown"
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=shown, no_dist=True)
    real, tensors = (pickle.loads((each / METADATA).read_bytes()) for each in (folder, shown))
    reader = _Reader(folder)
    name = f"c{Metadata.__module__}\nMetadata\n".encode()
    made = b"(" + _part(real.state_dict_metadata) + b"N" + _part(real.storage_data) + b"tR"
    shows = _part({"state_dict_metadata": tensors.state_dict_metadata}) + b"b"
    takes_all = _part(StorageMeta)  # and does nothing with it
    changes = name + b"(N}" + _part("__setstate__") + takes_all + b"stb0"
    (folder / METADATA).write_bytes(b"\x80\x03" + name + made + shows + changes + b".")
    with pytest.raises(CheckpointError, match="is not unpickled: it changes <class"):
        from_dcp(folder, tmp_path / "run")
    assert "__setstate__" not in vars(Metadata)
    with pytest.raises(CheckpointError, match=r"model\.a is no tensor"):
        _read(reader, tensors.state_dict_metadata)
    assert not ran.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x03",
        b"no pickle",
        b"\x80\x03h\x07.",
        b"\x80\x03K\x07R.",
        pickle.dumps({"model.a": 1}),
        pickle.dumps(Metadata({7: BytesStorageMetadata()}, storage_data={})),
        pickle.dumps(Metadata({"model.a": TensorStorageMetadata(1, 2, 3)}, storage_data={})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("model.a"): 5})),
        pickle.dumps(Metadata({}, storage_data=[5])),
    ],
    ids=range(10),
)
def test_metadata_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        from_dcp(tmp_path, tmp_path / "run")


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
    told = {"place": str(tmp_path / "dcp"), "step": 3, "num_tensors": 4, "left_out": []}
    assert json.loads(capsys.readouterr().out) == told
    assert run([*arguments, "--to", "dcp"]) == 2
    assert "expected a folder that is new or empty" in capsys.readouterr().err
    assert run(["checkpoint", "convert", arguments[3], str(tmp_path / "run"), "--to", "weft"]) == 0
    assert run(["checkpoint", "diff", str(tmp_path / "run"), arguments[2]]) == 0
    capsys.readouterr()
    (shards,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(shards, 100)
    damaged = ["checkpoint", "convert", arguments[3], str(tmp_path / "other"), "--to", "weft"]
    assert run(damaged) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read: " in line


def test_the_command_says_which_step_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is damaged: the one before is opened, as elsewhere."""
    for step in (3, 4):
        last = save(tmp_path / "weft", step, seed=3)
    next(last.glob("*.safetensors")).unlink()
    words = ["checkpoint", "convert", str(tmp_path / "weft"), str(tmp_path / "dcp"), "--to", "dcp"]
    assert run(words) == 0
    told = capsys.readouterr()
    assert "tensors of step 3" in told.out
    assert "opened step-00000003" in told.err


@pytest.mark.parametrize("to", ["dcp", "weft"])
def test_the_command_refuses_a_folder_of_something_else(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "convert", str(tmp_path), str(tmp_path / "new"), "--to", to]) == 2
    assert "FOLDER = " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
