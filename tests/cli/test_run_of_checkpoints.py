"""A run whose checkpoints lie elsewhere on this machine: what is beside its configuration is its
own, however its checkpoint is named."""

from pathlib import Path

import pytest

from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run

TINY = [
    *("data.path=text.txt", "data.seq_len=32", "plan.shares=[1]", "data.tokenizer=bytes"),
    *("model.d_model=16", "model.d_ff=24", "model.d_head=8", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=1", "batch.samples=4", "batch.micro=2"),
    *("train.eval_samples=8", "compute.device=cpu", "compute.precision=fp32", "train.steps=2"),
    *("sample.prompts=[]", "metrics.report=false"),
]


def test_what_a_run_keeps_beside_its_configuration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that looks like another run's, too, whose tokenizer went with the weights."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join("abcdefgh" * 40 for _ in range(60)))
    Path("base").mkdir()
    Path("base/tokenizer.json").write_text("another run's")
    to = f"checkpoint.to={tmp_path}/base/kept-of-{{run}}"
    assert run(["train", "debug", "--out", "mine", "--quiet", *TINY, to]) == 0
    kept, step = Path("base/kept-of-mine"), Path("base/kept-of-mine/step-00000002")
    own = Path("mine/tokenizer.json").read_bytes()
    for number, named in enumerate(("mine", str(kept), str(step))):
        assert open_checkpoint(Path(named)).run in (Path("mine"), Path("mine").resolve())
        assert run(["checkpoint", "export", named, "--to", f"exported{number}"]) == 0
        assert Path(f"exported{number}/tokenizer.json").read_bytes() == own
    assert run(["generate", "mine", "--prompt", "abc", "--tokens", "2"]) == 0
    assert run(["grow", "depth", "mine", "deep", "--num-layers", "3"]) == 0
    said = Path("deep/model.yaml").read_text()
    assert "text.txt" in said and Path("deep/tokenizer.json").read_bytes() == own
    capsys.readouterr()
    Path("mine").rename("renamed")
    assert open_checkpoint(kept).run is None, "of a run that is no more"
    assert run(["checkpoint", "export", str(kept), "--to", "bare"]) == 0
    assert "has no tokenizer.json, nor will bare" in capsys.readouterr().err
    assert not Path("bare/tokenizer.json").exists()
