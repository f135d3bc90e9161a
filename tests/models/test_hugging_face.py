"""The same weights give the same logits in transformers, both ways, and come back bit-equal."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from weft.config.errors import ConfigError
from weft.data.tokenizer import END, end_token_config, train_bpe
from weft.models.decoder_spec import DecoderSpec
from weft.models.hugging_face import INDEX, WEIGHTS, export_hf, import_hf
from weft.models.registry import FAMILIES, build_model
from weft.nn.context import Context
from weft.nn.init import initial_values
from weft.plan.box import Box
from weft.plan.model import ExpertsSpec, Init, LatentSpec, ParamSpec, RopeScaling

TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(2))
ATOL = 1e-5  # fp32 logits of about 1 in size; the two add in different orders

LLAMA_FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK_FIELDS = {
    **LLAMA_FIELDS,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
}
GPT2_FIELDS = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGER = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "by parts": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.0,
        "beta_fast": 4.0,
        "truncate": False,
    },
}
"""Samples of the tests have 40 tokens: more than were first trained on."""
THEIRS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA_FIELDS),
    "llama tied, wide heads": LlamaConfig(**LLAMA_FIELDS, tie_word_embeddings=True, head_dim=16),
    "llama stretched": LlamaConfig(**LLAMA_FIELDS, rope_parameters=STRETCHED),
    **{
        f"llama {name}": LlamaConfig(
            **{**LLAMA_FIELDS, "max_position_embeddings": 16 if name == "dynamic" else 64},
            rope_parameters={"rope_theta": 100.0, **scaling},
        )
        for name, scaling in LONGER.items()
    },
    "qwen 2": Qwen2Config(**LLAMA_FIELDS, tie_word_embeddings=True),
    "qwen 3": Qwen3Config(**LLAMA_FIELDS, head_dim=16, rope_parameters={"rope_theta": 1e6}),
    "mixtral": MixtralConfig(**LLAMA_FIELDS, num_local_experts=5, num_experts_per_tok=2),
    "qwen 2 moe": Qwen2MoeConfig(
        **LLAMA_FIELDS,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "qwen 3 moe": Qwen3MoeConfig(
        **LLAMA_FIELDS,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "olmoe": OlmoeConfig(**LLAMA_FIELDS, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    "deepseek": DeepseekV3Config(**DEEPSEEK_FIELDS, rope_parameters={**LATENT_YARN, "mscale": 1.0}),
    "deepseek, plain queries": DeepseekV3Config(
        **{**DEEPSEEK_FIELDS, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
    "gpt-2": GPT2Config(**GPT2_FIELDS),
    "gpt-2 untied, own width": GPT2Config(**GPT2_FIELDS, tie_word_embeddings=False, n_inner=72),
}


def _random_(model: torch.nn.Module) -> None:
    """Values that no two parameters share, biases and norms included."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            start = float(param.dim() == 1 and bool((param == 1).all()))
            param.copy_(start + 0.2 * torch.randn(param.shape, generator=generator))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))


def _their_model(config: PreTrainedConfig) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    _random_(model)
    return model


def _logits(spec: DecoderSpec, tensors: dict[str, Tensor]) -> Tensor:
    model = build_model(spec)
    model.load_state_dict(tensors)
    with torch.no_grad():
        return model.logits(model(TOKENS, Context()))


def _their_logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("size", ["10GB", "20kB"], ids=["one file", "sharded"])
def test_import_gives_their_logits(name: str, size: str, tmp_path: Path) -> None:
    theirs = _their_model(THEIRS[name])
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).is_file() == (size == "20kB")
    spec, tensors = import_hf(tmp_path)
    assert spec.tied == THEIRS[name].tie_word_embeddings
    torch.testing.assert_close(_logits(spec, tensors), _their_logits(theirs), rtol=0, atol=ATOL)


def _ours(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    def values(param: ParamSpec) -> Tensor:
        drawn = replace(param, init=Init("normal", 0.2))
        offset = 1.0 if param.init.kind == "ones" else 0.0
        return initial_values(5, drawn, Box.whole(param.shape), dtype) + offset

    return {param.name: values(param) for param in FAMILIES[spec.family].param_specs(spec)}


LLAMA = DecoderSpec(
    family="llama",
    d_model=32,
    d_ff=56,
    d_head=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    seq_len=64,
    norm_eps=1e-6,
    tied=False,
)
GPT2 = replace(LLAMA, family="gpt2", num_kv_heads=4, tied=True, dropout=0.1)
BIASED = ExpertsSpec(
    count=8,
    top_k=3,
    d_ff=24,
    dense_layers=1,
    scores="sigmoid",
    groups=4,
    top_groups=2,
    scale=2.5,
    bias_step=0.001,
    shared_d_ff=48,
    shared_gate=False,
)
DEEPSEEK = replace(
    LLAMA,
    d_head=18,
    num_kv_heads=4,
    rope_theta=100.0,
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=16),
    latent=LatentSpec(q_rank=14, kv_rank=18, d_rope=8, d_value=12),
    experts=BIASED,
)
OURS = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True, rope_theta=1e6),
    "llama stretched": replace(
        LLAMA,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=16
        ),
    ),
    **{
        f"llama {scaling.kind}": replace(LLAMA, rope_scaling=scaling)
        for scaling in (
            RopeScaling(kind="linear", factor=4.0),
            RopeScaling(kind="dynamic", factor=4.0, original_seq_len=16),
            RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, beta_fast=4.0),
        )
    },
    "wide heads": replace(LLAMA, d_head=16),
    "qkv bias": replace(LLAMA, qkv_bias=True),
    "qk norm": replace(LLAMA, qk_norm=True, d_head=16),
    "experts": replace(LLAMA, experts=ExpertsSpec(count=5, top_k=2)),
    "shared expert": replace(
        LLAMA,
        qkv_bias=True,
        experts=ExpertsSpec(count=6, top_k=3, normed=False, shared_d_ff=40),
    ),
    "experts, qk norm": replace(LLAMA, qk_norm=True, experts=ExpertsSpec(count=6, top_k=2)),
    "experts, norms over all heads": replace(
        LLAMA,
        qk_norm=True,
        norms_all_heads=True,
        experts=ExpertsSpec(count=6, top_k=2, normed=False),
    ),
    "deepseek": DEEPSEEK,
    "deepseek, plain queries": replace(
        DEEPSEEK,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, attention_factor=1),
        latent=LatentSpec(kv_rank=18, d_rope=8, d_value=12),
        experts=replace(BIASED, groups=1, top_groups=1, normed=False, dense_layers=0),
    ),
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied=False, dropout=0.0, d_ff=72),
}


@pytest.mark.parametrize("name", OURS)
def test_export_opens_in_transformers_with_our_logits(name: str, tmp_path: Path) -> None:
    spec, tensors = OURS[name], _ours(OURS[name])
    export_hf(tmp_path, spec, tensors.__getitem__, None)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report  # nothing missing, unexpected or mismatched
    assert model.config.eos_token_id is None and model.dtype == torch.float32
    torch.testing.assert_close(
        _their_logits(model.eval()), _logits(spec, tensors), rtol=0, atol=ATOL
    )


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000], ids=["one file", "sharded"])
def test_round_trip_is_bit_exact(
    name: str, dtype: torch.dtype, shard_bytes: int, tmp_path: Path
) -> None:
    tensors = _ours(OURS[name], dtype)
    export_hf(tmp_path, OURS[name], tensors.__getitem__, None, shard_bytes=shard_bytes)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (WEIGHTS in names) == (shard_bytes > 10_000)
    assert (INDEX in names) == (shard_bytes == 10_000)
    spec, back = import_hf(tmp_path)
    assert spec == OURS[name]
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == dtype and torch.equal(back[key], tensor), key


def test_sharded_export_opens_in_transformers(tmp_path: Path) -> None:
    tensors = _ours(GPT2)
    export_hf(tmp_path, GPT2, tensors.__getitem__, None, shard_bytes=10_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(_their_logits(model), _logits(GPT2, tensors), rtol=0, atol=ATOL)


def test_tokenizer_and_its_end_token_come_along(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "tokenizer.json").write_text(train_bpe(["a rose is a rose is a rose"] * 3, 300))
    (run / "tokenizer_config.json").write_text(end_token_config(END))
    export_hf(out, LLAMA, _ours(LLAMA).__getitem__, run / "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("a rose")["input_ids"]) == "a rose"
    assert tokenizer.eos_token == END
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id is not None


def test_older_names_and_fields_are_read(tmp_path: Path) -> None:
    """The first GPT-2 files: no prefix, the causal mask as a tensor, older fields."""
    export_hf(tmp_path, GPT2, _ours(GPT2).__getitem__, None)
    stored = load_file(tmp_path / WEIGHTS)
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(renamed, tmp_path / WEIGHTS)
    _edit(tmp_path, n_ctx=64, summary_type="cls_index", attn_pdrop=0.1)
    spec, back = import_hf(tmp_path)
    assert spec == GPT2
    assert all(torch.equal(back[name], tensor) for name, tensor in _ours(GPT2).items())


def _edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_hf(tmp_path, LLAMA, _ours(LLAMA).__getitem__, None)
    return tmp_path


FIELD_REFUSALS = {
    "architectures": (
        {"architectures": ["MambaForCausalLM"]},
        "config.json architectures = ['MambaForCausalLM']: expected one of LlamaForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM, "
        "Qwen3MoeForCausalLM, OlmoeForCausalLM, DeepseekV3ForCausalLM, GPT2LMHeadModel.",
    ),
    "activation": (
        {"hidden_act": "relu"},
        "config.json hidden_act = 'relu': expected 'silu'. Nothing else is implemented.",
    ),
    "bias": (
        {"attention_bias": True},
        "config.json attention_bias = true: expected false. Nothing else is implemented.",
    ),
    "rope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        'config.json rope_scaling rope_type = \'longrope\': expected one of "default", "linear", '
        '"dynamic", "yarn", "llama3".',
    ),
    "rope of another kind": (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 4}},
        "config.json rope_scaling beta_fast = 4: expected no such field. Weft does not know "
        "beta_fast. If the numbers do not depend on it, remove it.",
    ),
    "rope field": (
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "config.json rope_scaling partial_rotary_factor = 0.5: expected no such field. Weft does "
        "not know partial_rotary_factor. If the numbers do not depend on it, remove it.",
    ),
    "window": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "config.json layer_types = ['full_attention', 'sliding_attention']: expected "
        "full_attention only.",
    ),
    "unknown": (
        {"attn_logit_softcapping": 50.0},
        "config.json attn_logit_softcapping = 50.0: expected no such field. Weft does not know "
        "attn_logit_softcapping. If the numbers do not depend on it, remove it.",
    ),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "config.json quantization_config = {bits: 4}: expected no such field. Weft does not know "
        "quantization_config. If the numbers do not depend on it, remove it.",
    ),
    "not a number": (
        {"hidden_size": "32"},
        "config.json hidden_size = '32': expected an integer >= 1.",
    ),
    "not a flag": (
        {"tie_word_embeddings": 1},
        "config.json tie_word_embeddings = 1: expected true or false.",
    ),
    "eps of no number": (
        {"rms_norm_eps": float("nan")},
        "config.json rms_norm_eps = nan: expected a finite number > 0.",
    ),
    "eps below 0": (
        {"rms_norm_eps": -1e-5},
        "config.json rms_norm_eps = -1e-05: expected a finite number > 0.",
    ),
    "theta beyond all floats": (
        {"rope_theta": 10**400},
        f"config.json rope_theta = {str(10**400)[:150]} ...: expected a finite number > 0.",
    ),
    "layer types of no list": (
        {"layer_types": 5},
        "config.json layer_types = 5: expected a list of texts.",
    ),
    "layer types of lists": (
        {"layer_types": [["full_attention"]]},
        "config.json layer_types = [['full_attention']]: expected a list of texts.",
    ),
    "rope of no object": (
        {"rope_scaling": 5},
        "config.json rope_scaling = 5: expected an object.",
    ),
    "rope factor": (
        {"rope_parameters": {"rope_type": "llama3", "factor": "8"}},
        "config.json rope_scaling factor = '8': expected a finite number > 0.",
    ),
    "heads": (
        {"num_key_value_heads": 3},
        "model.num_kv_heads = 3: expected a divisor of num_heads (4).",
    ),
    "shape": (
        {"intermediate_size": 57},
        "tensor model.layers.0.mlp.gate_proj.weight = [56, 32]: expected a shape of 57x32.",
    ),
}


@pytest.mark.parametrize("name", FIELD_REFUSALS)
def test_refuses_what_it_does_not_implement(name: str, exported: Path) -> None:
    fields, message = FIELD_REFUSALS[name]
    _edit(exported, **fields)
    with pytest.raises(ConfigError) as caught:
        import_hf(exported)
    assert str(caught.value) == message


def test_files_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    """Not those of a private one."""
    before = os.umask(0o027)
    try:
        for shard_bytes in (1 << 30, 10_000):
            folder = tmp_path / str(shard_bytes)
            export_hf(folder, LLAMA, _ours(LLAMA).__getitem__, None, shard_bytes=shard_bytes)
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    finally:
        os.umask(before)


def test_a_config_nested_too_deep_is_refused(exported: Path) -> None:
    (exported / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "expected JSON" in _message(exported)


def _message(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        import_hf(folder)
    return str(caught.value)


def test_a_pickle_is_never_opened(exported: Path) -> None:
    (exported / WEIGHTS).rename(exported / "pytorch_model.bin")
    assert _message(exported) == (
        f"folder = '{exported}': expected safetensors files inside. pytorch_model.bin is a pickle, "
        "which can run code and is never opened here; from_pretrained and save_pretrained of "
        "transformers write safetensors in a place you trust."
    )


def test_a_tensor_may_not_lack(exported: Path) -> None:
    stored = load_file(exported / WEIGHTS)
    del stored["model.layers.1.self_attn.k_proj.weight"]
    save_file(stored, exported / WEIGHTS)
    assert _message(exported) == (
        "tensor = 'model.layers.1.self_attn.k_proj.weight': expected to be in the folder. "
        f"Looked in {exported}."
    )


def test_a_tensor_may_not_be_left_over(exported: Path) -> None:
    stored = load_file(exported / WEIGHTS)
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(stored, exported / WEIGHTS)
    assert _message(exported) == (
        "tensor = 'model.layers.0.self_attn.q_proj.bias': expected a parameter of this "
        f"architecture. Looked in {exported}."
    )


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    spec = OURS["llama tied"]
    export_hf(tmp_path, spec, _ours(spec).__getitem__, None)
    stored = load_file(tmp_path / WEIGHTS)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / WEIGHTS)
    assert import_hf(tmp_path)[0] == spec
    stored["lm_head.weight"][0, 0] += 1
    save_file(stored, tmp_path / WEIGHTS)
    assert "lm_head.weight" in _message(tmp_path)


def test_damage_is_told(exported: Path) -> None:
    whole = (exported / WEIGHTS).read_bytes()
    (exported / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert "expected a sound safetensors file" in _message(exported)
    (exported / "config.json").write_text("{")
    assert "expected JSON" in _message(exported)
    (exported / "config.json").unlink()
    assert "with a config.json" in _message(exported)


def test_an_index_stays_in_its_folder(exported: Path) -> None:
    (exported / INDEX).write_text(json.dumps({"weight_map": {"x": f"../{WEIGHTS}"}}))
    assert _message(exported) == (f"{INDEX} = '../{WEIGHTS}': expected a file in the same folder.")


def test_shapes_that_no_architecture_has(tmp_path: Path) -> None:
    both = replace(LLAMA, qkv_bias=True, qk_norm=True)
    with pytest.raises(ConfigError, match="one of the two"):
        export_hf(tmp_path, both, _ours(both).__getitem__, None)
    wide = replace(GPT2, d_head=16)
    with pytest.raises(ConfigError, match=r"model.d_head = 16: expected d_model / num_heads \(8\)"):
        export_hf(tmp_path, wide, _ours(wide).__getitem__, None)
    assert not list(tmp_path.iterdir())
