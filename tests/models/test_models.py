"""Models compute their formulas, in one piece or in stages, and know nothing of devices."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft.models
import weft.nn
from weft.config.errors import ConfigError
from weft.models.decoder import Decoder
from weft.models.decoder_spec import DecoderConfig, DecoderSpec
from weft.models.registry import FAMILIES, build_model, model_config, model_spec
from weft.nn.context import Context
from weft.nn.documents import Documents
from weft.nn.dropout import Dropout, dropout_keys
from weft.nn.init import initial_values
from weft.plan.box import Box

SPECS = {
    "llama": DecoderSpec(
        family="llama",
        d_model=16,
        d_ff=24,
        d_head=4,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=31,
        seq_len=16,
        norm_eps=1e-5,
        tied=False,
    )
}
SPECS["llama qkv bias, qk norm"] = replace(SPECS["llama"], qkv_bias=True, qk_norm=True)
SPECS["llama tied"] = replace(SPECS["llama"], tied=True)
SPECS["gpt2"] = replace(SPECS["llama"], family="gpt2", num_kv_heads=4, tied=True)
SPECS["gpt2 dropout"] = replace(SPECS["gpt2"], dropout=0.25)

generator = torch.Generator().manual_seed(4)
TOKENS = torch.randint(0, 31, (2, 9), generator=generator)
TARGETS = torch.randint(0, 31, (2, 9), generator=generator)
WEIGHTS = torch.rand(2, 9, generator=generator, dtype=torch.float64)


def _build(spec: DecoderSpec, *stage: range, embed: bool = True, head: bool = True) -> Decoder:
    model = build_model(spec, *stage, embed=embed, head=head).double()
    specs = {p.name: p for p in FAMILIES[spec.family].param_specs(spec)}
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = initial_values(9, specs[name], Box.whole(param.shape), torch.float64)
            param.copy_(value + 0.1 if param.dim() == 1 else 3 * value)
    return model


def _context(spec: DecoderSpec) -> Context:
    keys = dropout_keys(1, 2, torch.tensor([5, 6])) if spec.dropout else None
    return Context(dropout_keys=keys)


@pytest.mark.parametrize("name", SPECS)
def test_stages_give_what_the_whole_gives(name: str) -> None:
    """Loss and every gradient, cut after the first and second layer; a tied head on its own
    stage holds a copy of the embedding, whose gradients sum to the whole's."""
    spec = SPECS[name]
    whole, context = _build(spec), _context(spec)
    loss = whole.loss(whole(TOKENS, context), TARGETS, WEIGHTS)
    loss.backward()
    stages = [
        _build(spec, range(1), head=False),
        _build(spec, range(1, 2), embed=False, head=False),
        _build(spec, range(2, 3), embed=False),
    ]
    x = TOKENS
    for stage in stages:
        x = stage(x, context)
    split_loss = stages[-1].loss(x, TARGETS, WEIGHTS)
    split_loss.backward()
    assert torch.equal(split_loss, loss)
    split: dict[str, Tensor] = {}
    for stage in stages:
        for key, param in stage.named_parameters():
            assert param.grad is not None
            split[key] = split[key] + param.grad if key in split else param.grad
    assert split.keys() == {key for key, _ in whole.named_parameters()}
    for key, param in whole.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(split[key], param.grad, rtol=1e-12, atol=1e-14)
    owners = [[key for key, _ in stage.named_parameters()] for stage in stages]
    assert ("embed.weight" in owners[2]) == spec.tied and "embed.weight" in owners[0]


@pytest.mark.parametrize("name", SPECS)
def test_loss_is_the_weighted_sum_over_the_logits(name: str) -> None:
    model = _build(SPECS[name])
    hidden = model(TOKENS, _context(SPECS[name]))
    logits = model.logits(hidden)
    assert logits.shape == (2, 9, 31)
    each = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="none")
    torch.testing.assert_close(
        model.loss(hidden, TARGETS, WEIGHTS), (each * WEIGHTS.flatten()).sum(), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("name", SPECS)
def test_no_token_sees_a_later_one(name: str) -> None:
    model, changed = _build(SPECS[name]), TOKENS.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 31
    before, after = (model(tokens, Context()) for tokens in (TOKENS, changed))
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_documents_in_one_sample_do_not_see_each_other() -> None:
    """With positions that start again, the second document is computed as if it were alone."""
    model = _build(SPECS["llama"])
    documents = Documents.of(np.array([[0] * 4 + [1] * 5] * 2), "cpu")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    together = model(TOKENS, Context(positions=positions, documents=documents))
    torch.testing.assert_close(
        together[:, 4:], model(TOKENS[:, 4:], Context()), rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(
        together[:, :4], model(TOKENS[:, :4], Context()), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_positions_matter(name: str) -> None:
    model = _build(SPECS[name])
    shifted = torch.arange(9)[None] * 1 + torch.tensor([[0], [5]])
    apart, plain = model(TOKENS, Context(positions=shifted)), model(TOKENS, Context())
    torch.testing.assert_close(apart[0], plain[0], rtol=1e-12, atol=1e-13)
    same = torch.allclose(apart[1], plain[1])
    assert same == (name == "llama")  # rotary positions: only distances count


def test_dropout_is_of_the_sample_and_off_without_keys() -> None:
    spec = SPECS["gpt2 dropout"]
    model, context = _build(spec), _context(spec)
    dropped = model(TOKENS, context)
    assert torch.equal(dropped, model(TOKENS, context))
    assert context.dropout_keys is not None
    alone = model(TOKENS[1:], Context(dropout_keys=context.dropout_keys[1:]))
    torch.testing.assert_close(alone, dropped[1:], rtol=1e-12, atol=1e-13)
    plain = model(TOKENS, Context())
    assert torch.equal(plain, _build(SPECS["gpt2"])(TOKENS, Context()))
    assert not torch.equal(plain, dropped)


def test_each_dropout_has_a_site_of_its_own_whatever_the_stage() -> None:
    spec = SPECS["gpt2 dropout"]
    sites = [m.site for m in build_model(spec).modules() if isinstance(m, Dropout)]
    assert sorted(sites) == list(range(2 * spec.num_layers + 1))
    last = build_model(spec, range(2, 3), embed=False).layers["2"]
    assert [m.site for m in last.modules() if isinstance(m, Dropout)] == [5, 6]


@pytest.mark.parametrize("name", SPECS)
def test_a_step_down_the_gradient_lowers_the_loss_by_its_square(name: str) -> None:
    model, context, rate = _build(SPECS[name]), _context(SPECS[name]), 1e-7
    loss = model.loss(model(TOKENS, context), TARGETS, WEIGHTS)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params)
    expected = -rate * sum((grad**2).sum().item() for grad in grads)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param.sub_(rate * grad)
        change = (model.loss(model(TOKENS, context), TARGETS, WEIGHTS) - loss).item()
    assert change == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_lower_precisions_stay_close(name: str, dtype: torch.dtype) -> None:
    model = _build(SPECS[name])
    exact = model.loss(model(TOKENS, Context()), TARGETS, WEIGHTS).item()
    model = model.to(dtype)
    hidden = model(TOKENS, Context())
    assert hidden.dtype == dtype
    loss = model.loss(hidden, TARGETS, WEIGHTS.float())
    assert loss.dtype == torch.float32
    rel = 1e-5 if dtype == torch.float32 else 3e-2
    assert loss.item() == pytest.approx(exact, rel=rel)


# PyTorch warns of its own doings while it captures a block; a filter of its own hides it elsewhere.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2 dropout"])
def test_blocks_compile_to_the_same_numbers(name: str) -> None:
    """Captured whole, without breaks: what a backend compiles is the block."""
    model, context = _build(SPECS[name]), _context(SPECS[name])
    plain = model.loss(model(TOKENS, context), TARGETS, WEIGHTS)
    grads = torch.autograd.grad(plain, list(model.parameters()))
    for block in model.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    loss = model.loss(model(TOKENS, context), TARGETS, WEIGHTS)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(model.parameters())), grads, rtol=1e-10, atol=1e-13
    )


REFUSALS = {
    "size": (
        {"size": "demo5m"},
        "model.size = 'demo5m': expected one of {rows}. Did you mean demo-5m?",
    ),
    "size of another number": (
        {"size": "demo-8m"},
        "model.size = 'demo-8m': expected one of {rows}.",
    ),
    "kv heads": (
        {"num_kv_heads": 3},
        "model.num_kv_heads = 3: expected a divisor of num_heads (4).",
    ),
    "odd head": (
        {"d_head": 5},
        "model.d_head = 5: expected an even number (rotary positions).",
    ),
    "llama dropout": (
        {"dropout": 0.1},
        "model.dropout = 0.1: expected 0, as this family has no dropout.",
    ),
    "gpt2 kv heads": (
        {"family": "gpt2", "num_kv_heads": 2},
        "model.num_kv_heads = 2: expected 4 (num_heads), as this family shares no key heads.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    fields, message = REFUSALS[name]
    with pytest.raises(ConfigError) as caught:
        model_spec(DecoderConfig(**fields), 4096, 256)
    assert str(caught.value) == message.format(rows=", ".join(FAMILIES["llama"].sizes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "linear", "beta_fast": 4.0},
            "model.rope_scaling.beta_fast = 4.0: expected nothing where kind is linear. "
            "linear has factor.",
        ),
        (
            {"kind": "dynamic"},
            "model.rope_scaling.original_seq_len = null: expected an integer >= 1 where kind is "
            "dynamic.",
        ),
        (
            {"original_seq_len": 8, "high_freq_factor": 1.0},
            "model.rope_scaling.high_freq_factor = 1.0: expected more than low_freq_factor (1.0).",
        ),
        (
            {"kind": "yarn", "original_seq_len": 8, "beta_fast": 0.5},
            "model.rope_scaling.beta_fast = 0.5: expected more than beta_slow (1.0).",
        ),
    ],
)
def test_a_stretching_says_what_its_kind_needs_and_no_more(
    fields: dict[str, object], message: str
) -> None:
    config = model_config({"rope_scaling": {"factor": 4.0, **fields}})
    with pytest.raises(ConfigError) as caught:
        model_spec(config, 4096, 256)
    assert str(caught.value) == message


def test_a_vocabulary_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.vocab_size = 1: expected an integer >= 2"):
        model_spec(DecoderConfig(), 1, 256)


def test_overrides_and_the_data_s_sizes_go_in() -> None:
    config = DecoderConfig(family="gpt2", size="small", num_layers=3, dropout=0.0)
    row = FAMILIES["gpt2"].sizes["small"]
    expected = replace(row, num_layers=3, dropout=0.0, vocab_size=300, seq_len=77)
    assert model_spec(config, 300, 77) == expected


def test_all_that_a_size_of_its_own_lacks_is_said_at_once() -> None:
    said = {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ConfigError) as caught:
        model_spec(DecoderConfig(family="gpt2", size=None, **said), 300, 77)
    lacking = re.findall(r"model\.(\w+)", str(caught.value))
    assert sorted({*lacking} - {"size"}) == ["d_head", "norm_eps", "num_kv_heads", "tied"]
    rest = {"d_head": 16, "num_kv_heads": 4, "norm_eps": 1e-5, "tied": True}
    assert model_spec(DecoderConfig(family="gpt2", size=None, **said, **rest), 300, 77)


def _device_free_files() -> list[Path]:
    nn_folder, models = (Path(str(m.__path__[0])) for m in (weft.nn, weft.models))
    return sorted(nn_folder.glob("*.py")) + sorted(models.glob("*/model.py"))


def test_blocks_and_models_know_no_devices() -> None:
    files = _device_free_files()
    assert {"attention.py", "losses.py", "model.py"} <= {path.name for path in files}
    words = re.compile(r"\brank|\bmesh|world_size|torch\.distributed|\btp\b|\bdegree")
    for path in files:
        assert not words.search(path.read_text()), path


def test_sizes_layouts_and_names_need_no_torch() -> None:
    models = Path(str(weft.models.__path__[0]))
    files = [models / "decoder_family.py", models / "config_json.py"]
    files += [path for n in ("sizes", "layout", "convert") for path in models.glob(f"*/{n}.py")]
    assert len(files) >= 2 + 2 * len(FAMILIES)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "torch", path
            assert not (isinstance(node, ast.Import) and "torch" in ast.dump(node)), path
