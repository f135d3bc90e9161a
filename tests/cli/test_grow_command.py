"""``weft grow``: a run, the larger model that it becomes, and training that goes on there."""

import json
from pathlib import Path

import pytest

from weft.checkpoint.reader import open_checkpoint
from weft.cli.main import run
from weft.report.metrics import read_metrics

TINY = [
    *("data.path=text.txt", "data.tokenizer=bytes", "data.seq_len=32", "plan.shares=[1]"),
    *("model.d_model=16", "model.d_ff=24", "model.d_head=8", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=1", "batch.samples=4", "batch.micro=2"),
    *("train.eval_samples=8", "compute.device=cpu", "compute.precision=fp32", "train.steps=3"),
    *("sample.prompts=[]", "metrics.report=false"),
]


def test_a_run_grows_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join("abcdefgh" * 40 for _ in range(60)))
    assert run(["train", "debug", "--out", "small", "--quiet", *TINY]) == 0
    capsys.readouterr()
    grow = ["grow", "width", "small", "wide", "--d-model", "24", "--num-heads", "4"]
    assert run([*grow, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["grown"] == "wide/checkpoints/step-00000000" and said["keeps_function"]
    assert said["moments"] == "kept" and said["params"][0] < said["params"][1]
    assert run(["grow", "experts", "wide", "many", "--count", "4"]) == 0
    assert "weft train many/model.yaml --out many" in capsys.readouterr().out
    elsewhere = ["train", "many/model.yaml", "--out", "beside", "--quiet", "--steps", "1"]
    assert run([*elsewhere, "seed=1"]) == 0
    assert run(["train", "many/model.yaml", "--out", "many", "--quiet", "seed=1"]) == 0
    first = [read_metrics(Path(each, "metrics.jsonl"))[0][0].loss for each in ("beside", "many")]
    assert first[0] == first[1], "it begins with the grown weights, wherever"
    last = open_checkpoint(Path("many"))
    assert (last.step, last.state["updates"]) == (3, 6)  # moments were taken over
    losses = [json.loads(Path(each, "summary.json").read_text()) for each in ("small", "many")]
    small, many = (each["held_out"]["loss"] for each in losses)
    assert many < small
    assert run(grow) == 2
    assert "OUT = " in capsys.readouterr().err
    assert run(["grow", "depth", "small", "deep", "--num-layers", "10001"]) == 2
    assert "model.num_layers = 10001: expected less than or equal to" in capsys.readouterr().err
    Path("small/config.yaml").write_text("{")
    assert run(["grow", "depth", "small", "deep", "--num-layers", "9"]) == 2
    assert "at small/config.yaml:1" in capsys.readouterr().err
    Path("small/tokenizer.json").unlink()
    assert run(["checkpoint", "export", "small", "--to", "exported"]) == 0
    assert "note: small has no tokenizer.json, nor will exported" in capsys.readouterr().err
    assert run(["generate", "small", "-p", "a"]) == 1
    assert "small: has no tokenizer.json" in capsys.readouterr().err
    Path("small/tokenizer.json").write_text("{}")
    assert run(["checkpoint", "export", "small", "--to", "other"]) == 2
    assert "It has no model inside" in capsys.readouterr().err
    assert not any(Path(each).exists() for each in ("deep", ".deep.growing", "other"))
