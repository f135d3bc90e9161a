"""What rounding in bf16 explains and what it does not: a GPT-2 beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from weft.cluster.cluster import Cluster
from weft.comm.address import RankAddress
from weft.config.load import load_config
from weft.diagnose.reference import by_reference
from weft.diagnose.verdict import TOLERANCE
from weft.diagnose.verify import Difference, Trace, difference, in_small, one_process, rehearse
from weft.nn import attention
from weft.nn.documents import Packed
from weft.platform.detect import detect_node
from weft.resolve.resolve import resolve

Plant = Callable[[pytest.MonkeyPatch], None]


def here(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """A rank in this process."""
    assert world_size == 1
    return [job(RankAddress(), *args)]


def found() -> Difference:
    """The differences of ``weft verify demo-gpt2 compute.precision=bf16``, but for its plan's."""
    resolved = resolve(
        load_config("demo-gpt2", ["compute.precision=bf16"]), Cluster(nodes=(detect_node(),))
    )
    plan, rehearsal = in_small(resolved.plan, resolved.spec, resolved.config, 3)
    alone = rehearse(here, one_process(plan), rehearsal)
    return difference(by_reference(rehearsal, plan.global_batch), alone)


def test_rounding_of_gradients_that_are_zero_is_inside_the_tolerance() -> None:
    """The biases of keys: the softmax does not see what is added to all keys."""
    assert found().largest < TOLERANCE["bf16"], found()


def lost_bias(patch: pytest.MonkeyPatch) -> None:
    """The bias of queries gets no gradient; only that of keys is zero by itself."""
    right = attention.Attention.forward

    def wrong(self: attention.Attention, *args: Any) -> Tensor:
        if self.q.bias.requires_grad:
            self.q.bias.register_hook(lambda grad: grad * 0)
        return right(self, *args)

    patch.setattr(attention.Attention, "forward", wrong)


def short_keys(patch: pytest.MonkeyPatch) -> None:
    """A fifth of the gradient of keys is lost, on the path whose bias has none."""
    right = attention.causal_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        if k.requires_grad:
            k.register_hook(lambda grad: grad * 0.8)
        return right(q, k, v, packed)

    patch.setattr(attention, "causal_attention", wrong)


def biased_keys(patch: pytest.MonkeyPatch) -> None:
    """The bias of keys gets the gradient of one that the softmax would see."""
    right = attention.causal_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        if k.requires_grad:
            k.register_hook(lambda grad: grad + 0.3 * grad.abs())
        return right(q, k, v, packed)

    patch.setattr(attention, "causal_attention", wrong)


@pytest.mark.parametrize("plant", [lost_bias, short_keys, biased_keys])
def test_a_mistake_is_not(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert found().grad > TOLERANCE["bf16"], found()


def test_the_scale_of_a_bias_is_that_of_its_matrix() -> None:
    def trace(bias: float) -> Trace:
        grads = {"k.weight": np.array([[0.5, -2.0]]), "k.bias": np.array([bias, 0.0])}
        return Trace([1.0], [1.0], grads, {"k.bias": np.array([bias, 1.0])})

    found = difference(trace(0.0), trace(0.02))
    assert found.grad == pytest.approx(0.01) and found.param == pytest.approx(0.02)
