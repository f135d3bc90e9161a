"""Experts as Hugging Face writes them, one architecture after the other. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from weft.config.errors import ConfigError, show
from weft.models.config_json import Entry, Fields
from weft.models.decoder_spec import DecoderSpec
from weft.plan.model import ExpertsSpec

_MIXTRAL, _QWEN_2, _QWEN_3 = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
_OLMOE, DEEPSEEK = "OlmoeForCausalLM", "DeepseekV3ForCausalLM"
MIXTURES = {
    _MIXTRAL: (False, False, False),
    _QWEN_2: (True, False, False),
    _QWEN_3: (False, True, False),
    _OLMOE: (False, True, True),
    DEEPSEEK: (False, False, False),
}
"""(q, k and v have a bias; q and k have a norm; it is over all heads)."""
MODEL_TYPES = {
    _MIXTRAL: "mixtral",
    _QWEN_2: "qwen2_moe",
    _QWEN_3: "qwen3_moe",
    _OLMOE: "olmoe",
    DEEPSEEK: "deepseek_v3",
}
_QWEN_NAMES = {x: f"{x}_proj" for x in ("gate", "up", "down")}


def expert_entries(spec: DecoderSpec, layer: int) -> Iterator[Entry]:
    """Their names of one layer's experts."""
    assert spec.experts is not None, "a layer without experts"
    is_mixtral = not (spec.qkv_bias or spec.qk_norm or spec.latent)
    where = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    names = {"gate": "w1", "up": "w3", "down": "w2"} if is_mixtral else _QWEN_NAMES
    ours = f"layers.{layer}.ff"
    yield Entry(f"{where}.gate.weight", (f"{ours}.router.weight",))
    for own, name in names.items():
        for number in range(spec.experts.count):
            theirs = f"{where}.experts.{number}.{name}.weight"
            yield Entry(theirs, (f"{ours}.{own}.weight",), at=number)
    if spec.experts.bias_step is not None:
        yield Entry(f"{where}.gate.e_score_correction_bias", (f"{ours}.router.bias",))
    if spec.experts.shared_d_ff:
        shared = f"{where}.{'shared_experts' if spec.latent else 'shared_expert'}"
        yield from _shared_entries(shared, f"{ours}.shared", has_gate=spec.experts.shared_gate)


def _shared_entries(theirs: str, ours: str, *, has_gate: bool) -> Iterator[Entry]:
    if has_gate:
        yield Entry(f"{theirs}_gate.weight", (f"{ours}.gate.weight",))
    for own, name in _QWEN_NAMES.items():
        yield Entry(f"{theirs}.{name}.weight", (f"{ours}.ff.{own}.weight",))


def expert_fields(architecture: str, spec: DecoderSpec) -> dict[str, Any]:
    """What ``config.json`` says of them. Raises ConfigError: the architecture has no such ones."""
    experts = spec.experts
    assert experts is not None, "a shape without experts"
    if architecture == DEEPSEEK:
        return _deepseek_fields(spec, experts)
    has_shared = architecture == _QWEN_2
    if experts.scores != "softmax" or (experts.shared_d_ff > 0) != has_shared:
        words = f"scores {experts.scores}, shared_d_ff {experts.shared_d_ff}"
        shared = "a shared expert" if has_shared else "no shared expert"
        raise ConfigError("model.experts", words, f"softmax and {shared} in {architecture}")
    _must_be_usual(architecture, experts, _NOWHERE_ELSE)
    found = {"num_experts_per_tok": experts.top_k, "router_aux_loss_coef": experts.balance}
    if architecture == _MIXTRAL:
        if not experts.normed:
            raise ConfigError("model.experts.normed", False, f"true in {architecture}")
        return {**found, "intermediate_size": spec.d_ff, "num_local_experts": experts.count}
    if architecture == _OLMOE:
        return {
            **found,
            "intermediate_size": spec.d_ff,
            "num_experts": experts.count,
            "norm_topk_prob": experts.normed,
            "clip_qkv": None,
            "pad_token_id": None,  # there a token without a gradient
        }
    shared_width = {"shared_expert_intermediate_size": experts.shared_d_ff} if has_shared else {}
    return {
        **found,
        **shared_width,
        "num_experts": experts.count,
        "moe_intermediate_size": spec.d_ff,
        "norm_topk_prob": experts.normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_NOWHERE = ("choice", "capacity", "tasks")
_NOWHERE_ELSE = (
    *_NOWHERE,
    "d_ff",
    "dense_layers",
    "groups",
    "top_groups",
    "scale",
    "bias_step",
    "shared_gate",
)


def _must_be_usual(architecture: str, experts: ExpertsSpec, names: tuple[str, ...]) -> None:
    """Refuse what an architecture has no field for."""
    for name in names:
        value, known = asdict(experts)[name], ExpertsSpec.__dataclass_fields__[name].default
        if value != known:
            raise ConfigError(f"model.experts.{name}", value, f"{show(known)} in {architecture}")


def _deepseek_fields(spec: DecoderSpec, experts: ExpertsSpec) -> dict[str, Any]:
    """There is a bias that chooses and a shared expert, some times as wide as others, and no loss
    of loads."""
    _must_be_usual(DEEPSEEK, experts, (*_NOWHERE, "balance", "z"))
    width = experts.d_ff or spec.d_ff
    for name, value, fits, expected in (
        ("scores", experts.scores, experts.scores == "sigmoid", '"sigmoid"'),
        ("bias_step", experts.bias_step, experts.bias_step is not None, "a number"),
        ("shared_gate", experts.shared_gate, not experts.shared_gate, "false"),
        (
            "shared_d_ff",
            experts.shared_d_ff,
            experts.shared_d_ff > 0 and experts.shared_d_ff % width == 0,
            f"a multiple of the experts' width ({width})",
        ),
        (
            "groups",
            experts.groups,
            experts.count // experts.groups >= 2,
            f"at most {experts.count // 2}, as groups of one are not told apart there",
        ),
    ):
        if not fits:
            raise ConfigError(f"model.experts.{name}", value, f"{expected} in {DEEPSEEK}")
    return {
        "intermediate_size": spec.d_ff,
        "moe_intermediate_size": width,
        "first_k_dense_replace": experts.dense_layers,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": experts.shared_d_ff // width,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "norm_topk_prob": experts.normed,
        "routed_scaling_factor": experts.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


def _read_deepseek(fields: Fields) -> tuple[int, ExpertsSpec]:
    """Biases move as in DeepSeek-V3, for files do not say how far."""
    fields.must("scoring_func", "sigmoid")
    fields.must("topk_method", "noaux_tc")
    fields.must("moe_layer_freq", 1)
    fields.must("ep_size", 1)
    for name in ("aux_loss_alpha", "seq_aux"):
        fields.take(name)  # of training there
    if fields.take("num_nextn_predict_layers", 0) not in (0, 1):
        raise fields.refusal("num_nextn_predict_layers", "several", "0 or 1")
    width = fields.whole("moe_intermediate_size", 2048)
    dense = fields.take("first_k_dense_replace", 3)
    if type(dense) is not int or dense < 0:
        raise fields.refusal("first_k_dense_replace", dense, "an integer >= 0")
    return fields.whole("intermediate_size"), ExpertsSpec(
        count=fields.whole("n_routed_experts", 256),
        top_k=fields.whole("num_experts_per_tok", 8),
        d_ff=width,
        dense_layers=dense,
        scores="sigmoid",
        normed=fields.flag("norm_topk_prob", default=True),
        groups=fields.whole("n_group", 8),
        top_groups=fields.whole("topk_group", 4),
        scale=fields.positive("routed_scaling_factor", 2.5),
        bias_step=0.001,
        shared_d_ff=width * fields.whole("n_shared_experts", 1),
        shared_gate=False,
    )


def read_experts(architecture: str, fields: Fields) -> tuple[int, ExpertsSpec]:
    """Width and the rest. Raises ConfigError for layers without experts among those with."""
    if architecture == DEEPSEEK:
        return _read_deepseek(fields)
    balance = fields.part("router_aux_loss_coef", 0.001)
    fields.take("output_router_logits")  # what is returned beside the result
    top_k = fields.whole("num_experts_per_tok", 2)
    if architecture == _MIXTRAL:
        fields.must("router_jitter_noise", 0.0)
        experts = ExpertsSpec(
            count=fields.whole("num_local_experts", 8), top_k=top_k, balance=balance
        )
        return fields.whole("intermediate_size"), experts
    if architecture == _OLMOE:
        fields.must("clip_qkv", None)
        experts = ExpertsSpec(
            count=fields.whole("num_experts", 64),
            top_k=top_k,
            balance=balance,
            normed=fields.flag("norm_topk_prob", default=False),
        )
        return fields.whole("intermediate_size"), experts
    fields.take("intermediate_size")  # of layers without experts, of which there are none
    fields.must("decoder_sparse_step", 1)
    fields.must("mlp_only_layers", [])
    theirs, written = fields.take("num_experts"), fields.take("num_local_experts")
    count = theirs if written is None else written
    if type(count) is not int or count < 1:
        raise fields.refusal("num_experts", count, "an integer >= 1")
    shared = fields.whole("shared_expert_intermediate_size") if architecture == _QWEN_2 else 0
    normed = fields.flag("norm_topk_prob", default=False)
    width = fields.whole("moe_intermediate_size")
    return width, ExpertsSpec(
        count=count, top_k=top_k, balance=balance, normed=normed, shared_d_ff=shared
    )
