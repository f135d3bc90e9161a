"""Any module, traced on the meta device, against hand counts and the shape of a known model."""

from dataclasses import replace

import pytest
import torch
from cost.tracing import trace
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.cost.operators import stage_ops
from weft.cost.work import StageWork
from weft.models.llama.sizes import SIZES
from weft.models.registry import build_model, shape_of
from weft.nn.context import Context


def test_two_matrices_by_hand() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    traced = trace(module, lambda: (torch.zeros(5, 8),))
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    assert traced.params == 8 * 16 + 16 + 16 * 4 + 4
    assert traced.forward_flops == forward
    assert traced.backward_flops == 2 * forward - 2 * 5 * 8 * 16  # nobody asks for the input's
    assert traced.kept_bytes == 4 * 5 * (8 + 16)  # the input, and ReLU's result, which both need
    assert all(not parameter.is_meta for parameter in module.parameters())


class Logits(nn.Module):
    """A model up to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.model(tokens, Context()))


def test_a_known_model_has_the_products_of_its_shape() -> None:
    spec = replace(SIZES["debug-1m"], seq_len=16)
    traced = trace(Logits(build_model(spec)), lambda: (torch.zeros(2, 16, dtype=torch.long),))
    shape = shape_of(spec)
    work = StageWork(layers=(0, 3), embeds=True, predicts=True, samples=2, seq_len=16)
    ops = [(op, n) for op, n in stage_ops(shape, work) if op.kind == "matmul"]
    assert traced.params == shape.params
    assert traced.forward_flops >= sum(op.flops * n for op, n in ops)
    attention = sum(op.flops * n for op, n in stage_ops(shape, work) if op.kind == "attention")
    assert traced.forward_flops <= sum(op.flops * n for op, n in ops) + 2 * attention


class LooksAtValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


def test_what_cannot_be_traced_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"model = .*LooksAtValues.*: expected a module that"
    ) as e:
        trace(LooksAtValues(2, 2), lambda: (torch.zeros(1, 2),))
    assert "ModelShape" in str(e.value)
