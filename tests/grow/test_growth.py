"""Grown models: the same function in fp64, the gradients that moments stand for, and refusals."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.checkpoint.draft import draft
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.checkpoint.shard import Shard, elements_of
from weft.checkpoint.verify import verify
from weft.checkpoint.whole import saved_model
from weft.config.errors import ConfigError
from weft.grow import write
from weft.grow.folder import Grown, write_folder
from weft.grow.growth import Growth, deeper, wider, with_experts
from weft.models.decoder_spec import DecoderSpec
from weft.models.registry import FAMILIES, build_model, param_specs
from weft.nn.context import Context
from weft.plan.box import Box
from weft.plan.model import ExpertsSpec

TOLERANCE = 1e-10  # fp64
TINY = {"d_model": 16, "d_ff": 20, "d_head": 4, "num_layers": 3, "vocab_size": 11, "seq_len": 8}
LLAMA = replace(FAMILIES["llama"].sizes["debug-1m"], **TINY, num_heads=4, num_kv_heads=2)
TIED = replace(LLAMA, tied=True)
QWEN_2_5, QWEN_3 = replace(LLAMA, qkv_bias=True), replace(TIED, qk_norm=True)
MIXTURE = replace(LLAMA, experts=ExpertsSpec(count=4, top_k=2, shared_d_ff=8, balance=0.01))
GPT2 = replace(FAMILIES["gpt2"].sizes["debug-1m"], **TINY, num_heads=4, num_kv_heads=4)
DEEPSEEK = FAMILIES["llama"].sizes["debug-deepseek-1m"]
EXPERTS = ExpertsSpec(count=5, top_k=2)


@dataclass(frozen=True)
class Case:
    name: str
    old: DecoderSpec
    growth: Callable[[DecoderSpec], Growth]


def widths(name: str, old: DecoderSpec, **sizes: int) -> Case:
    return Case(name, old, partial(wider, sizes=sizes))


CASES = [
    widths("stream", LLAMA, d_model=24),
    widths("stream tied", TIED, d_model=25),
    widths("feed-forward", LLAMA, d_ff=53),
    widths("queries", LLAMA, num_heads=6),
    widths("keys alone", LLAMA, num_kv_heads=4),
    widths("all heads", LLAMA, num_heads=15, num_kv_heads=5),
    widths("biases", QWEN_2_5, d_model=40, d_ff=30, num_heads=8, num_kv_heads=4),
    widths("norms of heads, tied", QWEN_3, d_model=20, d_ff=30, num_heads=8),
    widths("with experts", MIXTURE, d_model=24, d_ff=30, num_heads=6),
    widths("gpt2", GPT2, d_model=48, d_ff=30, num_heads=7),
    Case("identity", QWEN_2_5, partial(deeper, num_layers=7, way="identity")),
    Case("identity gpt2", GPT2, partial(deeper, num_layers=4, way="identity")),
    Case("identity with experts", MIXTURE, partial(deeper, num_layers=5, way="identity")),
    Case("experts", LLAMA, partial(with_experts, experts=EXPERTS)),
]


def params_of(spec: DecoderSpec, seed: int = 1) -> dict[str, Tensor]:
    """Random ones, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    made = {p.name: torch.randn(p.shape, generator=generator).double() for p in param_specs(spec)}
    return {name: tensor + name.endswith("norm.weight") for name, tensor in made.items()}


def save(root: Path, spec: DecoderSpec, kinds: dict[str, dict[str, Tensor]]) -> Checkpoint:
    shards = [
        Shard(name, kind, tuple(tensor.shape), Box.whole(tensor.shape), tensor)
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    ]
    one = draft(root / "checkpoints", 7, "test")
    one.begin()
    state = {"step": 7, "samples": 7, "updates": 7, "model": asdict(spec)}
    one.commit([one.write(0, *elements_of(shards))], state)
    return open_checkpoint(root)


def grow(checkpoint: Checkpoint, growth: Growth, out: Path, **more: object) -> Grown:
    options = {"seed": 0, "keep_moments": True, "report": lambda *_: None, **more}
    return write_folder(checkpoint, growth, out, config_name="model.yaml", **options)


def whole(root: Path, kind: str = "param") -> tuple[DecoderSpec, dict[str, Tensor]]:
    checkpoint = open_checkpoint(root)
    spec = saved_model(checkpoint)
    assert isinstance(spec, DecoderSpec)
    return spec, {name: checkpoint.read(name, kind) for name in checkpoint.names(kind)}


def computed(
    spec: DecoderSpec, params: dict[str, Tensor]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss and gradients in fp64."""
    model = build_model(spec).double()
    model.load_state_dict(params)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(spec.vocab_size, (4, spec.seq_len), generator=generator)
    targets = torch.randint(spec.vocab_size, (4, spec.seq_len), generator=generator)
    logits = model.logits(model(tokens, Context()))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return logits.detach(), loss.item(), grads


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_stay(case: Case, tmp_path: Path) -> None:
    """Also with copies whose shares differ at random."""
    params = params_of(case.old)
    growth = replace(case.growth(case.old), uneven=0.7)
    found = grow(save(tmp_path / "old", case.old, {"param": params}), growth, tmp_path / "new")
    spec, grown = whole(tmp_path / "new")
    assert spec == growth.new and verify(found.written.place).ok and growth.keeps_function
    assert sum(map(torch.numel, grown.values())) > sum(map(torch.numel, params.values()))
    before, after = computed(case.old, params)[0], computed(spec, grown)[0]
    assert torch.allclose(after, before, rtol=0, atol=TOLERANCE * before.abs().max().item())
    assert before.std() > 0.1


MOMENTS = ["stream", "stream tied", "feed-forward", "queries", "biases", "norms of heads, tied"]


@pytest.mark.parametrize("case", [c for c in CASES if c.name in MOMENTS], ids=lambda c: c.name)
def test_moments_are_those_of_the_grown_gradient(case: Case, tmp_path: Path) -> None:
    """A gradient that grows by the rule of first moments is the grown model's own."""
    params = params_of(case.old)
    grads = computed(case.old, params)[2]
    squares = {name: grad.square() for name, grad in grads.items()}
    kinds = {"param": params, "exp_avg": grads, "exp_avg_sq": squares}
    grow(save(tmp_path / "old", case.old, kinds), case.growth(case.old), tmp_path / "new")
    spec, grown = whole(tmp_path / "new")
    own = computed(spec, grown)[2]
    means, mean_squares = (whole(tmp_path / "new", kind)[1] for kind in ("exp_avg", "exp_avg_sq"))
    assert own.keys() == means.keys() == mean_squares.keys()
    for name, grad in own.items():
        assert torch.allclose(means[name], grad, rtol=1e-8, atol=TOLERANCE), name
        assert torch.allclose(mean_squares[name], grad.square(), rtol=1e-8, atol=TOLERANCE), name
    assert open_checkpoint(tmp_path / "new").state["updates"] == 7


def test_experts_share_the_moments_and_the_gate_has_none(tmp_path: Path) -> None:
    params = params_of(LLAMA)
    old = save(tmp_path / "old", LLAMA, {"param": params, "momentum": params})
    grow(old, with_experts(LLAMA, EXPERTS), tmp_path / "new")
    momentum = whole(tmp_path / "new", "momentum")[1]
    shared = momentum["layers.1.ff.down.weight"].sum(0)
    assert torch.allclose(shared, params["layers.1.ff.down.weight"])
    assert not momentum["layers.1.ff.router.weight"].any()
    assert whole(tmp_path / "new")[1]["layers.1.ff.router.weight"].std() > 0.01


def test_further_rows_come_from_the_next_layer(tmp_path: Path) -> None:
    """AKI, by hand; the last layer copies itself, and tables and norms grow as ever."""
    params = params_of(LLAMA)
    growth = wider(LLAMA, {"d_ff": 25, "d_model": 32, "num_heads": 8}, from_above=True)
    grow(save(tmp_path / "old", LLAMA, {"param": params}), growth, tmp_path / "new")
    spec, grown = whole(tmp_path / "new")
    for layer, above in ((0, 1), (1, 2), (2, 2)):
        up, further = (params[f"layers.{n}.ff.up.weight"] for n in (layer, above))
        rows = torch.cat([up, further[:5]])
        expected = torch.cat([rows, rows], dim=1) / 2
        assert torch.equal(grown[f"layers.{layer}.ff.up.weight"], expected)
        queries, theirs = (params[f"layers.{n}.attn.q.weight"] for n in (layer, above))
        rows = torch.cat([queries[:8], theirs[:8], queries[8:], theirs[8:]])
        expected = torch.cat([rows, rows], dim=1) / 2
        assert torch.equal(grown[f"layers.{layer}.attn.q.weight"], expected)
    table = params["embed.weight"]
    assert torch.equal(grown["embed.weight"], torch.cat([table, table], dim=1))
    assert torch.equal(grown["norm.weight"], params["norm.weight"].repeat(2))
    assert not growth.keeps_function
    assert abs(computed(spec, grown)[1] - computed(LLAMA, params)[1]) > 1e-3


@pytest.mark.parametrize(
    ("way", "layers"),
    [("interpolate", (0, 0, 1, 1, 2)), ("stack", (0, 1, 2, 0, 1)), ("identity", (0, 0, 1, 1, 2))],
)
def test_layers_are_copied_in_their_order(
    way: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    params = params_of(LLAMA)
    growth = deeper(LLAMA, 5, way)
    grow(save(tmp_path / "old", LLAMA, {"param": params}), growth, tmp_path / "new")
    grown = whole(tmp_path / "new")[1]
    for new, old in enumerate(layers):
        assert torch.equal(
            grown[f"layers.{new}.attn.v.weight"], params[f"layers.{old}.attn.v.weight"]
        )
        is_blank = way == "identity" and old in layers[:new]
        for name in ("attn.o", "ff.down"):
            assert is_blank != bool(grown[f"layers.{new}.{name}.weight"].any())
    assert growth.keeps_function == (way == "identity")


def test_memory_holds_a_part_of_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts make the same bits as wholes, and no more of the old model is read at once."""
    params = params_of(MIXTURE)
    old = save(tmp_path / "old", MIXTURE, {"param": params})
    growth = wider(MIXTURE, {"d_model": 24, "d_ff": 53, "num_heads": 6})
    grow(old, growth, tmp_path / "whole")
    largest = 0
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str, kind: str, box: Box) -> Tensor:
        nonlocal largest
        largest = max(largest, 8 * prod(box.size))
        return read(self, name, kind, box)

    monkeypatch.setattr(Checkpoint, "read", watched)
    part = 8 * 24 * 53
    monkeypatch.setattr(write, "PART_BYTES", part)
    grow(old, growth, tmp_path / "parts")
    assert 0 < largest <= part
    monkeypatch.undo()
    one, other = whole(tmp_path / "whole")[1], whole(tmp_path / "parts")[1]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_growth_leaves_nothing_to_mistake(tmp_path: Path) -> None:
    old = save(tmp_path / "old", LLAMA, {"param": params_of(LLAMA)})

    def killed(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(old, deeper(LLAMA, 4, "stack"), tmp_path / "new", report=killed)
    assert not (tmp_path / "new").exists()
    grow(old, deeper(LLAMA, 4, "stack"), tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}


REFUSALS: dict[str, tuple[Callable[[], Growth], str]] = {
    "narrower": (
        partial(wider, LLAMA, {"d_ff": 8}),
        "--d-ff = 8: expected at least 20, as it is now.",
    ),
    "as before": (partial(wider, LLAMA, {}), "--d-model = 16: expected a width that grows"),
    "heads that do not divide": (
        partial(wider, LLAMA, {"num_heads": 7}),
        "model.num_kv_heads = 2: expected a divisor of num_heads (7).",
    ),
    "queries lost": (
        partial(wider, replace(LLAMA, num_heads=8), {"num_heads": 9, "num_kv_heads": 3}),
        "--num-heads = 9: expected at least 12.",
    ),
    "a mean over channels": (
        partial(wider, GPT2, {"d_model": 24}),
        "--d-model = 24: expected a multiple of 16.",
    ),
    "no more layers": (
        partial(deeper, LLAMA, 3, "stack"),
        "--num-layers = 3: expected more than 3, as it has now.",
    ),
    "layers that are not alike": (
        partial(deeper, DEEPSEEK, 6, "stack"),
        "FOLDER = '1 layers without experts': expected a model whose layers are alike.",
    ),
    "heads through low ranks": (
        partial(wider, DEEPSEEK, {"num_heads": 8}),
        "FOLDER = 'model.latent': expected a model without latent attention where heads grow.",
    ),
    "experts of another width": (
        partial(wider, DEEPSEEK, {"d_ff": 704}),
        "FOLDER = 'experts of 48': expected a model whose experts are d_ff wide where that grows.",
    ),
    "experts already": (
        partial(with_experts, MIXTURE, EXPERTS),
        "FOLDER = '4 experts': expected a model without experts.",
    ),
    "a family without experts": (
        partial(with_experts, GPT2, EXPERTS),
        "FOLDER = 'gpt2': expected a model of a family that has experts (llama).",
    ),
    "too few experts": (
        partial(with_experts, LLAMA, ExpertsSpec(count=2, top_k=3)),
        "model.experts.top_k = 3: expected at most experts.count (2).",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_grow_is_refused(case: str) -> None:
    growth, words = REFUSALS[case]
    with pytest.raises(ConfigError) as caught:
        growth()
    assert str(caught.value).startswith(words)
