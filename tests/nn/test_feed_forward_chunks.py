"""A feed-forward of some tokens at a time gives what that of all gives, and never has as much."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn.feed_forward import GeluMLP, SwiGLU
from weft.nn.recomputed import recompute
from weft.nn.stage import Unit
from weft.recompute.registry import MODES

BATCH, SEQ, D_MODEL, D_FF = 2, 100, 16, 64
CHUNK_TOKENS = 48
"""Of two samples: the last chunk is of four tokens each."""


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("outer", ["", "full"])
@pytest.mark.parametrize("kind", [SwiGLU, GeluMLP])
def test_chunks_change_nothing_but_memory(kind: type[nn.Module], outer: str) -> None:
    torch.manual_seed(3)
    at_once = kind(D_MODEL, D_FF).double()
    chunked = kind(D_MODEL, D_FF).double()
    chunked.load_state_dict(at_once.state_dict())
    unit = Unit(chunked, block=chunked)
    recompute(unit, replace(MODES["chunks"], chunk_tokens=CHUNK_TOKENS))
    if outer:
        recompute(unit, MODES[outer])
    x, grad = torch.randn(2, BATCH, SEQ, D_MODEL, dtype=torch.float64)
    whole, one = differentiated(at_once, x, grad)
    with Largest() as made:
        parts, other = differentiated(unit, x, grad)
    for name in ("result", "input"):
        torch.testing.assert_close(parts.pop(name), whole.pop(name), rtol=0, atol=1e-15)
    assert one == other
    mine = dict(chunked.named_parameters())
    for name, param in at_once.named_parameters():
        torch.testing.assert_close(mine[name].grad, param.grad, rtol=1e-12, atol=1e-12)
    assert 0 < made.elements < BATCH * SEQ * D_FF / 2


def differentiated(
    call: Any, x: Tensor, grad: Tensor
) -> tuple[dict[str, Tensor], tuple[torch.Size, torch.dtype]]:
    """The result and the gradient of what enters; and what the result is like."""
    given = x.clone().requires_grad_()
    result = call(given)
    result.backward(grad)
    assert given.grad is not None
    return {"result": result.detach(), "input": given.grad}, (result.shape, result.dtype)
