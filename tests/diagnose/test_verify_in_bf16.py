"""What rounding in bf16 explains and what it does not: a GPT-2 beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from weft.cluster.cluster import Cluster
from weft.comm.address import RankAddress
from weft.config.load import load_config
from weft.config.optim_sections import AdamWConfig, CosineSchedule, SgdConfig
from weft.diagnose.reference import by_reference
from weft.diagnose.verdict import TOLERANCE
from weft.diagnose.verify import (
    Difference,
    Rehearsal,
    Trace,
    difference,
    enlarged_rounding,
    in_small,
    one_process,
    rehearse,
)
from weft.models.gpt2.sizes import SIZES
from weft.nn import attention
from weft.nn.documents import Packed
from weft.optim.adamw.rule import AdamW
from weft.optim.rule import Update
from weft.platform.detect import detect_node
from weft.resolve.resolve import resolve

Plant = Callable[[pytest.MonkeyPatch], None]


def here(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """A rank in this process."""
    assert world_size == 1
    return [job(RankAddress(), *args)]


def found(seed: int = 4) -> Difference:
    """The differences of ``weft verify demo-gpt2 compute.precision=bf16``, but for its plan's."""
    settings = ["compute.precision=bf16", f"seed={seed}"]
    resolved = resolve(load_config("demo-gpt2", settings), Cluster(nodes=(detect_node(),)))
    plan, rehearsal = in_small(resolved.plan, resolved.spec, resolved.config, 3)
    alone = rehearse(here, one_process(plan), rehearsal)
    known = by_reference(rehearsal, plan.global_batch)
    return difference(known, alone, enlarged_rounding(known, rehearsal, "bf16"))


@pytest.mark.parametrize("seed", [0, 4])
def test_rounding_of_gradients_that_are_zero_is_inside_the_tolerance(seed: int) -> None:
    """The biases of keys, for the softmax does not see what is added to all keys; and single
    elements of others that happen to be nearly zero, whose update has either sign."""
    assert found(seed).largest < TOLERANCE["bfloat16"], found(seed)


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
    assert found().grad > TOLERANCE["bfloat16"], found()


@pytest.mark.parametrize("name", ["k.bias", "o.bias"])
def test_a_wrong_update_of_a_bias_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, whose gradient is rounding, too: such a one does not move by itself."""
    right = AdamW.update

    def wrong(self: AdamW, update: Update) -> None:
        right(self, update)
        for main in (each for group in update.groups for each in group.mains):
            if main.spec.name.endswith(name):
                main.value.add_(0.5 * update.lr)

    monkeypatch.setattr(AdamW, "update", wrong)
    assert found().param > TOLERANCE["bfloat16"] > found().grad, found()


def test_what_an_optimizer_may_make_of_rounding() -> None:
    """Twice the learning rate where a gradient's sign is not known, and next to nothing where it is
    far above the noise; nothing by gradient descent, which divides by no size."""
    grads = {"k.bias": np.array([0.0, 1.0])}
    optim = AdamWConfig(lr=0.01, schedule=CosineSchedule(warmup=0)).rehearsed(1e-5)
    rehearsal = Rehearsal(spec=SIZES["debug-1m"], optim=optim, seq_len=16, seed=0, steps=1)
    trace = Trace([1.0], [1.0], grads, grads)
    allowed = enlarged_rounding(trace, rehearsal, "bf16")["k.bias"]
    noise = 16 * 2.0**-8
    assert allowed == pytest.approx([0.02, 0.01 * noise / 1.00001])
    off = Trace([1.0], [1.0], grads, {"k.bias": np.array([0.03, 1.0])})
    found = difference(trace, off, {"k.bias": allowed})
    assert (found.param, found.param_beyond) == pytest.approx((0.03, 0.01))
    assert found.largest == found.param_beyond, "what is explained is said, and is no mistake"
    assert enlarged_rounding(trace, replace(rehearsal, optim=SgdConfig()), "bf16") == {}


def test_the_scale_of_a_bias_is_that_of_its_matrix() -> None:
    def trace(bias: float) -> Trace:
        grads = {"k.weight": np.array([[0.5, -2.0]]), "k.bias": np.array([bias, 0.0])}
        return Trace([1.0], [1.0], grads, {"k.bias": np.array([bias, 1.0])})

    found = difference(trace(0.0), trace(0.02))
    assert found.grad == pytest.approx(0.01) and found.param == pytest.approx(0.02)
