"""The most bytes that losses hold, counted by allocators, beside the model of memory."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from chipb.chip import NAME, with_chips
from torch import Tensor, nn

from weft.comm.address import RankAddress
from weft.cost.activations import CHUNK_COMPILED, CHUNK_ELSEWHERE, CHUNK_LOGITS, logits
from weft.cost.work import StageWork
from weft.elastic.pool import WorkerPool
from weft.models.shape import ModelShape
from weft.nn import losses
from weft.nn.rows_loss import RowsLoss, merged
from weft.parallel.tp.modules import VocabCrossEntropy

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A head on one rank: its rows of the vocabulary, and its tokens."""

    kind: str
    dtype: str
    tokens: int
    d_model: int
    rows: int
    trained: bool = True

    def work(self, device: str) -> StageWork:
        return StageWork(
            layers=(0, 0),
            embeds=False,
            predicts=0.5 if self.kind == "part" else 1,
            samples=1,
            seq_len=self.tokens,
            axes=(("tp", 2),) if self.kind == "divided" else (),
            dtype=self.dtype,
            frozen=not self.trained,
            in_chunks=True,
            eager=device == "cpu",
            apart=device != "cpu",
        )

    def has_room_of_its_own(self, device: str) -> bool:
        """Products in bf16 copy what they read on a processor that has instructions for them."""
        fast = device == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return fast and self.dtype == "bf16"

    def is_told(self, device: str, many: float) -> bool:
        """Exactly but for little things, and for at most a copy of what a product reads."""
        expected = self.told(device)
        if not self.has_room_of_its_own(device):
            return many == pytest.approx(expected, rel=0.03)
        copies = 2 * self.d_model * (self.tokens + self.rows)
        return 0.97 * expected < many < 1.06 * expected + copies

    def told(self, device: str) -> float:
        work = self.work(device)
        kept = work.wide * self.tokens * self.rows * (self.kind == "part")  # for backward
        return logits(self.shape(), work) + kept

    def shape(self) -> ModelShape:
        whole = self.rows * (1 if self.kind == "whole" else 2)
        sizes = {"d_model": self.d_model, "vocab_size": whole, "d_ff": 1, "num_layers": 1}
        return ModelShape(**sizes, num_heads=1, num_kv_heads=1, d_head=1, gated=False)


SIZES = ((512, 64, 4096), (2048, 256, 1024), (1024, 512, 256), (512, 1024, 256))
"""Where logits take most, hidden states, the weight, and a few rows."""
CASES = [
    Case(kind, dtype, *sizes, trained)
    for kind, trained in (("whole", True), ("whole", False), ("divided", True), ("part", True))
    for dtype in ("fp32", "bf16")
    for sizes in SIZES
]
CHUNK = 1 << 20
"""Logits at once, in place of an accelerator's."""


def _loss(kind: str) -> Loss:
    if kind == "whole":
        return losses.linear_cross_entropy
    if kind == "divided":
        alone = SimpleNamespace(all_reduce=lambda *_, **__: None)
        total: Any = SimpleNamespace(first=0, group=SimpleNamespace(comm=alone, ranks=(0,)))
        return VocabCrossEntropy(nn.Identity(), total)
    return _of_part


def _of_part(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    found, rest = RowsLoss(0)(hidden, weight, targets)
    return (rest(merged([found])) * weights).sum()


def most(_: RankAddress, name: str, cases: list[Case]) -> list[int]:
    """Bytes at the peak of a loss and its backward, for each."""
    losses.CHUNK_LOGITS[NAME] = CHUNK
    return [_most(torch.device(name), case) for case in cases]


def _most(device: torch.device, case: Case) -> int:
    dtype = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    hidden = torch.zeros(1, case.tokens, case.d_model, dtype=dtype, device=device)
    weight = nn.Parameter(torch.zeros(case.rows, case.d_model, dtype=dtype, device=device))
    weight.register_post_accumulate_grad_hook(_let_go)
    weight.requires_grad_(case.trained)
    targets = torch.zeros(1, case.tokens, dtype=torch.int64, device=device)
    weights = torch.ones(1, case.tokens, device=device)
    inputs = hidden.requires_grad_(), weight, targets, weights
    peak = _counted(device, sum(tensor.nbytes for tensor in inputs))
    _loss(case.kind)(*inputs).backward()
    return peak()


def _let_go(param: Tensor) -> None:
    param.grad = None


def _counted(device: torch.device, held: int) -> Callable[[], int]:
    """What gives the most bytes that were allocated from here on; ``held``: what is there."""
    gc.collect()
    if device.type == "cpu":
        torch.ops.chipb.count()
        return torch.ops.chipb.most_bytes
    before = torch.ops.chipb.peak_bytes()  # which only grows: be there again
    ballast = torch.empty(max(before - held, 1), dtype=torch.uint8, device=device)
    first = torch.ops.chipb.peak_bytes()
    return lambda: torch.ops.chipb.peak_bytes() - first + 0 * len(ballast)


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_as_the_model_has_it(
    device: str, chips: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cost.activations.CHUNK_ELSEWHERE", CHUNK)
    (found,) = chips.run(with_chips, most, device, CASES, world_size=1)
    wrong = [
        (case, many / case.told(device))
        for case, many in zip(CASES, found, strict=True)
        if not case.is_told(device, many)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_as_many_at_once_as_the_losses_have() -> None:
    assert losses.CHUNK_LOGITS == {"cpu": CHUNK_LOGITS}
    assert losses.CHUNK_LOGITS_ELSEWHERE == CHUNK_ELSEWHERE
    assert losses.CHUNK_LOGITS_COMPILED == CHUNK_COMPILED
