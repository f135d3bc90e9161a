"""Kept activations against the published formulas (arXiv 2205.05198, table 2)."""

from dataclasses import replace

import pytest

from weft.cost.activations import layer_kept, layer_working, logits, stage_kept
from weft.cost.work import StageWork
from weft.models.shape import ExpertShape, ModelShape
from weft.recompute.asked import slabs_of

S, B, H, A, T = 2048, 4, 6144, 64, 8
GPT = ModelShape(
    num_layers=48,
    d_model=H,
    d_ff=4 * H,
    num_heads=A,
    num_kv_heads=A,
    d_head=H // A,
    vocab_size=51_200,
    gated=False,
    dropout=True,
)
WORK = StageWork(
    layers=(0, 48),
    embeds=True,
    predicts=True,
    samples=B,
    seq_len=S,
    fused_attention=False,
    sequence_parallel=False,
)
ROWS = [
    ("one rank", {}, 34 + 5 * A * S / H),
    ("tensor", {"axes": (("tp", T),)}, 10 + 24 / T + 5 * A * S / (H * T)),
    (
        "and sequence",
        {"axes": (("tp", T),), "sequence_parallel": True},
        34 / T + 5 * A * S / (H * T),
    ),
    ("selective", {"axes": (("tp", T),), "recompute": ((("core",), 1.0),)}, 10 + 24 / T),
    ("full", {"axes": (("tp", T),), "recompute": slabs_of("full", 48)}, 2),
]


@pytest.mark.parametrize(
    ("change", "expected"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_published_formula(change, expected) -> None:
    kept = layer_kept(GPT, WORK._replace(**change), experts=False)
    assert kept == pytest.approx(S * B * H * expected)


def test_half_is_between() -> None:
    off, half, full = (
        layer_kept(GPT, WORK._replace(recompute=slabs_of(text, 48)), experts=False)
        for text in ("off", "full:24", "full")
    )
    assert half == (off + full) / 2


def test_linear_term_of_a_long_sequence() -> None:
    """256 Ki tokens of 1024 channels: more than a layer's worth of any chip, without scores."""
    llama = replace(GPT, d_model=1024, d_ff=4096, num_heads=8, num_kv_heads=8, d_head=128)
    llama = replace(llama, gated=True, dropout=False)
    long = WORK._replace(samples=1, seq_len=1 << 18, fused_attention=True)
    kept = layer_kept(llama, long, experts=False)
    # norms 4, attention 4, gate, up and product 12: 20 times [tokens, channels] in two bytes.
    assert kept == pytest.approx(20 * 2 * 1024 * (1 << 18) + 4 * 8 * (1 << 18))
    assert kept / 2**30 == pytest.approx(10, rel=0.01)


def test_experts_keep_what_each_token_visits() -> None:
    mixed = replace(GPT, experts=ExpertShape(num_experts=8, top_k=2, d_ff=100, dense_layers=1))
    dense = layer_kept(mixed, WORK, experts=False)
    sparse = layer_kept(mixed, WORK, experts=True)
    assert dense - sparse == 2 * S * B * (2 * 4 * H - 2 * (2 * 100 + 2 * H))


def test_ends_of_a_pipeline_keep_more() -> None:
    middle = WORK._replace(embeds=False, predicts=False)
    assert stage_kept(GPT, middle) == 48 * layer_kept(GPT, middle, experts=False)
    assert stage_kept(GPT, WORK) == stage_kept(GPT, middle) + S * B * (8 + H) + 4 * S * B * H
    assert logits(GPT, middle) == 0
    assert logits(GPT, WORK._replace(axes=(("tp", 8),))) == 10 * S * B * 51_200 / 8


def test_a_feed_forward_in_chunks_comes_back_by_chunk() -> None:
    """Beside what else a layer computes again, which comes back whole."""
    full, both = (WORK._replace(recompute=slabs_of(t, 48)) for t in ("full", "full+chunks"))
    assert layer_kept(GPT, full, experts=False) == layer_kept(GPT, both, experts=False)
    less = layer_working(GPT, full, experts=False) - layer_working(GPT, both, experts=False)
    rest = 1 - 2048 / (S * B)
    # What its activation reads and makes, and a gradient of it: 4 channels each, in two bytes.
    assert less == pytest.approx(rest * 3 * 2 * S * B * 4 * H)


def test_recomputed_layer_comes_back_to_work() -> None:
    full, off = WORK._replace(recompute=slabs_of("full", 48)), WORK
    more = layer_working(GPT, full, experts=False) - layer_working(GPT, off, experts=False)
    kept = layer_kept(GPT, off, experts=False) - layer_kept(GPT, full, experts=False)
    assert more == pytest.approx(kept)
