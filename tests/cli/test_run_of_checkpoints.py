"""A run whose checkpoints lie elsewhere on this machine: what is beside its configuration is its
own, however its checkpoint is named."""

from pathlib import Path

import pytest

from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run


def test_what_a_run_keeps_beside_its_configuration_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that looks like another run's, too, whose tokenizer went with the weights."""
    monkeypatch.chdir(here)
    Path("base").mkdir()
    Path("base/tokenizer.json").write_text("another run's")
    to = f"checkpoint.to={here}/base/kept-of-{{run}}"
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet", "--steps", "2", to]) == 0
    kept, step = Path("base/kept-of-mine"), Path("base/kept-of-mine/step-00000002")
    own = Path("mine/tokenizer.json").read_bytes()
    for number, named in enumerate(("mine", str(kept), str(step))):
        assert open_checkpoint(Path(named)).run in (Path("mine"), Path("mine").resolve())
        assert run(["checkpoint", "export", named, "--to", f"exported{number}"]) == 0
        assert Path(f"exported{number}/tokenizer.json").read_bytes() == own
    assert run(["generate", "mine", "--prompt", "abc", "--tokens", "2"]) == 0
    assert run(["grow", "depth", "mine", "deep", "--num-layers", "9"]) == 0
    said = Path("deep/model.yaml").read_text()
    assert "batch:" in said and Path("deep/tokenizer.json").read_bytes() == own
    capsys.readouterr()
    Path("mine").rename("renamed")
    assert open_checkpoint(kept).run is None, "of a run that is no more"
    assert run(["checkpoint", "export", str(kept), "--to", "bare"]) == 0
    assert "has no tokenizer.json, nor will bare" in capsys.readouterr().err
    assert not Path("bare/tokenizer.json").exists()
