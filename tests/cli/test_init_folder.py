"""``--init FOLDER``: the model, its weights and its tokenizer from a Hugging Face folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.whole import load_model
from weft.cli.main import run
from weft.cli.target import load
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.data.tokenizer import train_bpe
from weft.models.config_folder import read_spec, section_of
from weft.models.registry import FAMILIES, model_config, model_spec
from weft.nn.context import Context
from weft.resolve.resolve import spec_asked
from weft.train.run_folder import changes

BASE = [
    *("data.path=text.txt", "data.tokenizer=bytes", "data.seq_len=32", "plan.shares=[1]"),
    *("batch.samples=4", "batch.micro=2", "train.eval_samples=2", "compute.device=cpu"),
    *("compute.precision=fp32", "sample.prompts=[]", "metrics.report=false"),
]
LLAMA = LlamaConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
)
GPT2 = GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=4, n_positions=48)


def write(folder: Path, config: PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def hf(here: Path) -> Path:
    write(here / "hf", LLAMA)
    return here / "hf"


def test_a_llama_of_another_eps_trains_and_opens_in_transformers(
    hf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command; the first rows of 264 are the 257 of the tokenizer."""
    monkeypatch.setenv("WEFT_PROFILES", str(hf.parent / "no-profiles"))
    train = ["train", "debug", "--init", "hf", *BASE, "--out", "run"]
    assert run([*train, "train.steps=2"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["mfu"] is None
    basis = summary["mfu_reference"]["basis"]
    assert basis == "there is no profile for this CPU; run `weft chips profile`"
    config = load_config("run/config.yaml").config
    assert config.init == "hf" and config.model.size is None and config.model.vocab_size == 264
    assert not changes(Path("run"), load("debug", ["--init", "hf", *BASE, "train.steps=2"]).config)
    spec, _ = read_spec(hf)
    assert (spec.norm_eps, spec.rope_theta, spec.tied) == (1e-6, 5e5, False)  # type: ignore[attr-defined]
    begun = load_model(open_checkpoint(Path("run/checkpoints/step-00000000")))
    tokens = torch.arange(24)[None] * 7 % 257
    theirs = AutoModelForCausalLM.from_pretrained("hf", attn_implementation="eager").eval()
    assert_same_logits(begun, theirs, tokens)

    assert run(["checkpoint", "export", "run", "--to", "back"]) == 0
    assert json.loads(Path("back/config.json").read_text())["rms_norm_eps"] == 1e-6
    trained = load_model(open_checkpoint(Path("run")))
    again = AutoModelForCausalLM.from_pretrained("back", attn_implementation="eager").eval()
    assert_same_logits(trained, again, tokens)
    assert not torch.equal(trained.embed.weight, begun.embed.weight)  # type: ignore[union-attr]
    capfd.readouterr()
    assert run([*train, "model.norm_eps=1e-5"]) == 2
    assert capfd.readouterr().err == (
        "error: the configuration is not valid\n"
        "  model.norm_eps = 1e-05: expected 1e-06, as hf/config.json says. Leave model.norm_eps "
        "out: it comes from there.\n      on the command line\n"
    )


def assert_same_logits(ours: Any, theirs: torch.nn.Module, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        logits = ours.logits(ours(tokens, Context()))
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=1e-5)


def message(*words: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        load("debug", [*BASE, *words])
    return "\n".join(f"{error} ({error.where})" for error in caught.value.errors)


def test_what_contradicts_the_folder_is_named_with_both_values(hf: Path) -> None:
    assert message("--init", "hf", "model.size=debug-1m", "model.tied=true") == (
        "model.size = 'debug-1m': expected null, as hf/config.json says. Leave model.size out: it "
        "comes from there. (on the command line)\n"
        "model.tied = true: expected false, as hf/config.json says. Leave model.tied out: it comes "
        "from there. (on the command line)"
    )
    assert load("--init", ["hf", *BASE]).config.model.d_model == 32, "of the demo"  # type: ignore[attr-defined]
    equal = load("debug", [*BASE, "init=hf", "model.d_model=32", "model.norm_eps=1e-6"])
    assert str(equal.origins["model.norm_eps"]) == "at hf/config.json"


def test_a_person_s_file_contradicts_and_a_recipe_gives_way(hf: Path, here: Path) -> None:
    (here / "own.yaml").write_text("extends: demo-gpt2\ninit: hf\ndata: {tokenizer: bytes}\n")
    assert load("own.yaml", []).config.model.family == "llama"
    (here / "own.yaml").write_text("extends: demo\ninit: hf\nmodel: {d_ff: 64}\n")
    with pytest.raises(ConfigErrors, match=r"model.d_ff = 64: expected 56, as hf/config.json says"):
        load("own.yaml", [])


def test_the_tokenizer_comes_along_or_is_asked_for(hf: Path) -> None:
    base = [word for word in BASE if not word.startswith("data.tokenizer")]
    with pytest.raises(ConfigErrors, match=r"hf has no tokenizer.json; name the one"):
        load("debug", [*base, "--init", "hf"])
    (hf / "tokenizer.json").write_text(train_bpe(["a rose is a rose"], 262))
    config = load("debug", [*base, "--init", "hf"]).config
    assert config.data.tokenizer == "hf/tokenizer.json" and spec_asked(config).vocab_size == 264


def test_a_table_of_positions_decides_the_length_of_samples(here: Path) -> None:
    write(here / "hf", GPT2)
    base = [word for word in BASE if not word.startswith("data.seq_len")]
    config = load("debug", [*base, "--init", "hf", "model.dropout=0"]).config
    spec = spec_asked(config)
    assert (config.data.seq_len, spec.dropout, spec.family) == (48, 0.0, "gpt2")
    assert spec == read_spec(here / "hf")[0].__class__(**{**vars_of(spec), "norm_eps": 1e-5})
    said = message("--init", "hf")
    assert said.startswith("data.seq_len = 32: expected 48, as hf/config.json says.")


def vars_of(spec: Any) -> Mapping[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_a_rehearsal_keeps_the_numbers_of_the_folder(hf: Path) -> None:
    """What ``weft verify`` runs at small size."""
    spec: Any = spec_asked(load("debug", [*BASE, "--init", "hf"]).config).reduced()
    assert (spec.norm_eps, spec.rope_theta) == (1e-6, 5e5)


def test_a_folder_that_is_none_is_refused(hf: Path) -> None:
    assert "init = 'nowhere': expected a Hugging Face folder" in message("--init", "nowhere")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "rms_norm_eps": -1}))
    assert "config.json rms_norm_eps = -1: expected a finite number > 0." in message("init=hf")


def test_weights_that_do_not_fit_are_refused_by_the_ranks(
    hf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (hf / "model.safetensors").write_bytes(b"x" * 100)
    assert run(["train", "debug", "--init", "hf", *BASE, "--out", "run", "--quiet"]) == 2
    assert "expected a sound safetensors file" in capfd.readouterr().err
    assert not Path("run").exists()


def test_import_says_which_model_it_is(hf: Path, here: Path) -> None:
    assert run(["checkpoint", "import", "hf", "--to", "imported"]) == 0
    (here / "own.yaml").write_text("extends: imported/model.yaml\nbatch: {samples: 4, micro: 2}\n")
    config = load(
        "own.yaml", ["data.path=text.txt", "data.tokenizer=bytes", "data.seq_len=64"]
    ).config
    assert spec_asked(config) == read_spec(hf)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_can_be_said_in_full(family: str) -> None:
    for spec in FAMILIES[family].sizes.values():
        section = section_of(spec)
        assert section["size"] is None
        assert model_spec(model_config(section), spec.vocab_size, spec.seq_len) == spec
