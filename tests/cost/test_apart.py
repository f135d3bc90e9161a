"""What single operations move and keep where no compiler fuses them: counted as they are made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cost.activations import layer_items
from weft.cost.choice import choice_of
from weft.cost.operators import layer_ops, stage_ops
from weft.cost.work import StageWork, Training
from weft.models.shape import ModelShape
from weft.nn.feed_forward import SwiGLU
from weft.nn.rope import rotate, rotation
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, StagePlan

SHAPE = ModelShape(
    num_layers=2, d_model=16, d_ff=48, num_heads=4, num_kv_heads=2, d_head=8, vocab_size=32,
    gated=True,
)  # fmt: skip
WORK = StageWork(layers=(0, 2), embeds=True, predicts=True, samples=3, seq_len=64, apart=True)
TOKENS = 3 * 64


class Moved(TorchDispatchMode):
    """Bytes read and written by operations, but for views, products and what has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten.t):
            every = [*args, *(made if isinstance(made, tuple) else (made,))]
            found = [each for each in every if isinstance(each, Tensor)]
            self.num_bytes += sum(each.nbytes for each in found if each.numel() >= TOKENS * 8)
        return made


def moved(run: Callable[[], object]) -> int:
    with Moved() as counter:
        run()
    return counter.num_bytes


def named(name: str, work: StageWork = WORK) -> float:
    return next(op for op in layer_ops(SHAPE, work, experts=False) if op.name == name).num_bytes


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16, requires_grad=True)


def test_a_rotation_goes_through_memory_by_itself() -> None:
    turn = rotation(torch.arange(64)[None], 8, theta=1e4, scaling=None, dtype=torch.bfloat16)
    q, k = ones(3, 64, 4, 8), ones(3, 64, 2, 8)
    assert moved(lambda: (rotate(q, turn), rotate(k, turn))) == named("rotation")


def test_a_gate_is_read_and_written_once_more() -> None:
    part = SwiGLU(16, 48).bfloat16()
    gate, up = ones(TOKENS, 48), ones(TOKENS, 48)
    assert moved(lambda: part._activate(gate, up)) == named("activation")
    assert named("activation") == named("activation", WORK._replace(apart=False)) * 5 / 3


def test_a_gate_is_kept_on_both_sides() -> None:
    part, kept = SwiGLU(16, 48).bfloat16(), dict[int, int]()

    def pack(x: Tensor) -> Tensor:
        if x.shape[:1] == (TOKENS,):  # not weights
            kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = part(ones(TOKENS, 16))
    told = layer_items(SHAPE, WORK, experts=False)
    assert sum(kept.values()) == told["gates"] + told["hidden"] + told["ff read"]
    compiled = layer_items(SHAPE, WORK._replace(apart=False), experts=False)
    assert told["hidden"] == 2 * compiled["hidden"]
    y.sum().backward()


@pytest.mark.parametrize(("device", "compiled", "is_apart"), [
    ("cuda", False, True), ("cuda", True, False), ("cpu", False, False),
])  # fmt: skip
def test_where_it_is_asked_for(device: str, compiled: bool, is_apart: bool) -> None:
    stage = StagePlan(mesh=Mesh.of(range(1)), layers=(0, 2), device=device)
    pipeline = PipelinePlan(stages=(stage,), samples=2, microbatch=1)
    work = choice_of(pipeline, 0, 64, training=Training(compiled=compiled)).work
    assert work.apart is is_apart
    names = [op.name for op, _ in stage_ops(SHAPE, work)]
    assert ("rotation" in names) is is_apart
    one = replace(stage, compile=compiled)
    said = Training(compiled=not compiled, by_stage=True)
    by_itself = choice_of(replace(pipeline, stages=(one,)), 0, 64, training=said)
    assert by_itself.work.apart is is_apart, "stages of a plan that is decided say it themselves"
