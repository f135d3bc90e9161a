"""FLOPs by hand and against PyTorch's own counter."""

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from weft.cost.flops import forward_flops_per_token, train_flops_per_token
from weft.models.llama.sizes import SIZES
from weft.models.registry import FAMILIES, build_model
from weft.nn.context import Context


def test_by_hand() -> None:
    spec = replace(
        SIZES["debug-1m"],
        d_model=8,
        d_ff=16,
        d_head=4,
        num_heads=2,
        num_kv_heads=1,
        num_layers=3,
        vocab_size=10,
    )
    # q 8x8, k and v 8x4 each, o 8x8; gate, up, down 8x16; scores and values over 5 tokens.
    matrices = 64 + 32 + 32 + 64 + 3 * 128
    layer = 2 * matrices + 2 * 2 * 5 * 8
    assert forward_flops_per_token(spec, 10) == 3 * layer + 2 * 8 * 10
    assert train_flops_per_token(spec, 10) == 3 * forward_flops_per_token(spec, 10)


def test_matrix_products_agree_with_torch() -> None:
    """Attention apart, which PyTorch's counter does not see in the CPU kernel."""
    for family in FAMILIES.values():
        spec = replace(next(iter(family.sizes.values())), seq_len=16)
        model = build_model(spec)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model.logits(model(tokens, Context()))
        linear = sum(
            flops
            for name, flops in counter.get_flop_counts()["Global"].items()
            if str(name) in ("aten.mm", "aten.addmm")
        )
        scores = spec.num_layers * 2 * 2 * 8 * spec.num_heads * spec.d_head
        assert linear / 32 == forward_flops_per_token(spec, 16) - scores
