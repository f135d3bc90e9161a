"""Checkpoints from and to Hugging Face folders, bit for bit."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import cut, edit_index, save, save_shards
from safetensors.torch import load_file
from torch import Tensor

from weft.checkpoint.convert import export_hf, import_hf
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.verify import verify
from weft.checkpoint.whole import saved_model
from weft.models import hugging_face
from weft.models.registry import FAMILIES
from weft.plan.box import Box
from weft.plan.model import ModelSpec

TINY = {"d_model": 16, "d_ff": 24, "d_head": 4, "num_layers": 2, "num_heads": 4}
SPECS = {
    "llama": replace(
        FAMILIES["llama"].sizes["debug-1m"], **TINY, num_kv_heads=2, vocab_size=11, seq_len=8
    ),
    "gpt2": replace(
        next(iter(FAMILIES["gpt2"].sizes.values())),
        **TINY,
        num_kv_heads=4,
        vocab_size=11,
        seq_len=8,
    ),
}


def save_model(root: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Random parameters over two ranks, matrices cut by rows, and moments beside them."""
    generator = torch.Generator().manual_seed(1)
    params, ranks = {}, [[], []]
    for param in FAMILIES[spec.family].param_specs(spec):
        whole = params[param.name] = torch.randn(param.shape, generator=generator)
        rows, rest = param.shape[0], param.shape[1:]
        for rank, (low, high) in enumerate([(0, rows // 3), (rows // 3, rows)]):
            box = Box((low, *(0 for _ in rest)), (high - low, *rest))
            ranks[rank] += [cut("param", param.name, whole, box)]
            ranks[rank] += [cut("exp_avg", param.name, whole + 1, box)]
    save_shards(root, 7, ranks, {"model": asdict(spec)})
    return params


@pytest.mark.parametrize("family", SPECS)
def test_export_and_import_come_back(family: str, tmp_path: Path) -> None:
    params = save_model(tmp_path / "a", SPECS[family])
    export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf")
    folder = import_hf(tmp_path / "hf", tmp_path / "b")
    back = open_checkpoint(tmp_path / "b")
    assert (folder.name, back.step, back.kinds) == ("step-00000000", 0, ["param"])
    assert saved_model(back) == SPECS[family]
    assert set(back.names()) == set(params)
    for name, whole in params.items():
        assert torch.equal(back.read(name), whole)
    assert verify(folder).ok


def test_export_converts_on_request(tmp_path: Path) -> None:
    params = save_model(tmp_path / "a", SPECS["llama"])
    export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf", dtype=torch.bfloat16)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(theirs, params["norm.weight"].to(torch.bfloat16))


def test_tensors_are_read_when_asked_for(tmp_path: Path) -> None:
    """With the files gone after opening, everything but reading still works."""
    save_model(tmp_path, SPECS["llama"])
    checkpoint = open_checkpoint(tmp_path)
    for file in checkpoint.files:
        (checkpoint.folder / file).unlink()
    assert "norm.weight" in checkpoint.names() and "exp_avg" not in checkpoint.names()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.read("norm.weight")


def forget(data: dict) -> None:
    del data["state"]["model"]


NO_MODELS: dict[str, tuple[Callable[[dict], object], str]] = {
    "none": (forget, "does not say which model it is of"),
    "unknown family": (
        lambda data: data["state"]["model"].update(family="../x"),
        "is of a model that cannot be built",
    ),
    "unknown field": (
        lambda data: data["state"]["model"].update(wings=2),
        "is of a model that cannot be built",
    ),
    "a word for a number": (
        lambda data: data["state"]["model"].update(d_model="many"),
        "is of a model that cannot be built",
    ),
    "another shape": (
        lambda data: data["state"]["model"].update(vocab_size=12),
        "param/embed.weight: stored with shape (11, 16), the model has (12, 16)",
    ),
    "more layers": (
        lambda data: data["state"]["model"].update(num_layers=3),
        "param/layers.2.attn_norm.weight",
    ),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_export_refuses_what_is_no_model(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, SPECS["llama"])
    change, words = NO_MODELS[case]
    edit_index(tmp_path / "step-00000007", change)
    with pytest.raises(CheckpointError) as caught:
        export_hf(open_checkpoint(tmp_path), tmp_path / "hf")
    assert words in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_import_never_joins_other_checkpoints(tmp_path: Path) -> None:
    save_model(tmp_path / "a", SPECS["llama"])
    export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf")
    save(tmp_path / "b", 5, seed=1)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        import_hf(tmp_path / "hf", tmp_path / "b")
    assert open_checkpoint(tmp_path / "b").step == 5


def test_export_to_where_nothing_can_be_written(tmp_path: Path) -> None:
    save_model(tmp_path / "a", SPECS["llama"])
    (tmp_path / "hf").touch()
    with pytest.raises(CheckpointError, match="hf: cannot be written"):
        export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf")


@pytest.mark.parametrize("was_there", [False, True])
def test_nothing_is_left_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_there: bool
) -> None:
    """So that the next try has a new folder, or an empty one."""
    save_model(tmp_path / "a", SPECS["llama"])
    if was_there:
        (tmp_path / "hf").mkdir()

    def fails(*_: object) -> None:
        assert list((tmp_path / "hf").iterdir()), "it had begun"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "_write_json", fails)
        with pytest.raises(CheckpointError, match="No space left on device"):
            export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf")
    assert (tmp_path / "hf").is_dir() == was_there
    assert not was_there or not list((tmp_path / "hf").iterdir())
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf/mine").touch()
    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "_write_json", fails)
        with pytest.raises(CheckpointError):
            export_hf(open_checkpoint(tmp_path / "a"), tmp_path / "hf")
    assert (tmp_path / "hf/mine").exists()
