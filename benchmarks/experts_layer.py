"""A layer of experts beside a loop over experts in plain PyTorch and the layer of Hugging Face.

    python -m benchmarks.experts_layer [--repeats N] [--threads N] [--dtype fp32|bf16]

Forward and backward of one layer with 64 experts, nothing dropped, at several sizes. All layers
have the same weights; that they agree is asked first, in fp32. Then the seconds of the processor
that each takes, by turns, as medians, and how often that is Weft's. Last the products alone: one an
expert, as Weft makes them where PyTorch has no grouped one, and that one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from weft.nn.experts.feed_forward import Experts
from weft.nn.experts.grouped import one_by_one
from weft.nn.feed_forward import SwiGLU
from weft.plan.model import ExpertsSpec

EXPERTS = 64
HUGGING_FACE = ("eager", "grouped_mm")
"""Its forms of one layer; a third one copies matrices for every token."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Of one layer and what it is given."""

    tokens: int
    top_k: int
    d_model: int
    d_ff: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens to {self.top_k} each, {self.d_model} x {self.d_ff}"


SIZES = (
    Size(256, 8, 128, 64),
    Size(512, 8, 256, 128),
    Size(2048, 8, 256, 128),
    Size(2048, 2, 512, 512),
    Size(2048, 8, 512, 256),
)


class PlainLoop(nn.Module):
    """What one writes first: of each expert the tokens that chose it, added where they were."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.top_k = size.top_k
        self.router = nn.Linear(size.d_model, EXPERTS, bias=False)
        self.experts = nn.ModuleList(SwiGLU(size.d_model, size.d_ff) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, d_model]`` to as much."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).float().softmax(-1)
        shares, chosen = scores.topk(self.top_k, dim=-1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            found = expert(rows[token]) * shares[token, place, None]
            total.index_add_(0, token, found)
        return total.view_as(x)


def weft_layer(size: Size) -> Experts:
    """Ours, with random weights."""
    spec = ExpertsSpec(count=EXPERTS, top_k=size.top_k)
    layer = Experts(size.d_model, size.d_ff, spec, seq_len=size.tokens)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.05)
    return layer


def plain_layer(size: Size, ours: Experts) -> PlainLoop:
    """A loop with the same weights."""
    layer = PlainLoop(size)
    layer.router.weight.data.copy_(ours.router.weight)
    for number, expert in enumerate(layer.experts):
        for name in ("gate", "up", "down"):
            stacked = ours.get_submodule(name).get_parameter("weight")
            expert.get_submodule(name).get_parameter("weight").data.copy_(stacked[number])
    return layer


def their_layer(size: Size, ours: Experts, form: str) -> Qwen3MoeSparseMoeBlock:
    """That of Qwen 3 in Hugging Face's package, with the same weights."""
    config = Qwen3MoeConfig(
        hidden_size=size.d_model,
        moe_intermediate_size=size.d_ff,
        num_experts=EXPERTS,
        num_experts_per_tok=size.top_k,
        norm_topk_prob=True,
        experts_implementation=form,
    )
    layer = Qwen3MoeSparseMoeBlock(config)
    layer.gate.weight.data.copy_(ours.router.weight)
    both = torch.cat((ours.gate.weight, ours.up.weight), 1)
    layer.experts.gate_up_proj.data.copy_(both)
    layer.experts.down_proj.data.copy_(ours.down.weight)
    return layer


def both_ways(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient of ``x``; weights' gradients are made as well."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    result = layer(x)
    result = result[0] if isinstance(result, tuple) else result
    result.backward(grad)
    assert x.grad is not None
    return result.detach(), x.grad


def layers(size: Size) -> dict[str, nn.Module]:
    """All contenders, with the same weights."""
    ours = weft_layer(size)
    theirs = {f"Hugging Face, {form}": their_layer(size, ours, form) for form in HUGGING_FACE}
    return {"Weft": ours, "plain loop": plain_layer(size, ours), **theirs}


def refuse_unlike(found: Mapping[str, nn.Module], x: Tensor, grad: Tensor) -> None:
    """All compute the same."""
    wanted = both_ways(found["Weft"], x, grad)
    for name, layer in found.items():
        for ours, other in zip(wanted, both_ways(layer, x, grad), strict=True):
            torch.testing.assert_close(other, ours, rtol=1e-3, atol=1e-4, msg=name)


def by_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of the processor of each; one round is left out."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begun = process_time()
            call()
            taken[name].append(process_time() - begun)
    return {name: median(times[1:]) for name, times in taken.items()}


def of_layers(size: Size, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Seconds of all layers at one size."""
    torch.manual_seed(0)
    found = layers(size)
    x, grad = torch.randn(2, 1, size.tokens, size.d_model).unbind()
    refuse_unlike(found, x, grad)
    x, grad = x.to(dtype), grad.to(dtype)
    calls = {name: partial(both_ways, layer.to(dtype), x, grad) for name, layer in found.items()}
    return by_turns(calls, repeats)


def of_products(size: Size, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Seconds of the products alone, forward and backward, with tokens given out at random."""
    torch.manual_seed(0)
    rows = size.tokens * size.top_k
    counts = torch.bincount(torch.randint(EXPERTS, (rows,)), minlength=EXPERTS)
    ends = counts.cumsum(0).to(torch.int32)
    x = torch.randn(rows, size.d_model, dtype=dtype, requires_grad=True)
    weight = torch.randn(EXPERTS, size.d_ff, size.d_model, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, size.d_ff, dtype=dtype)
    forms: dict[str, Callable[[], Tensor]] = {
        "one an expert": lambda: one_by_one(x, weight, ends),
        "grouped": lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
    }
    calls = {name: lambda form=form: form().backward(grad) for name, form in forms.items()}
    return by_turns(calls, repeats)


def main() -> None:
    """Measure, and print what was found as it is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    for size in SIZES:
        say(f"{EXPERTS} experts, {size}, {options.dtype}, {options.threads} threads")
        for measure in (of_layers, of_products):
            times = measure(size, dtype, options.repeats)
            first = next(iter(times.values()))
            for name, seconds in times.items():
                say(f"  {name:26} {seconds * 1e3:8.1f} ms {seconds / first:6.2f}")


def say(words: str) -> None:
    """A line, at once."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
