"""The model, and what it is trained to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from task_experts.sizes import VisionSpec
from weft.nn.attention import Attention
from weft.nn.context import Context
from weft.nn.experts.feed_forward import Experts, no_tokens
from weft.nn.losses import LinearCrossEntropy
from weft.nn.norm import RMSNorm
from weft.nn.stage import STREAM, Buffer, Output, Term, Terms, Tree, Unit
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.model import UnitName

EPS = 1e-6


class Block(nn.Module):
    """Attention to all patches, and experts of the image's task."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(spec.d_model, EPS)
        heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_heads}
        self.attn = Attention(spec.d_model, spec.d_head, **heads)
        self.attn.both_ways()
        self.ff_norm = RMSNorm(spec.d_model, EPS)
        self.ff = Experts(spec.d_model, spec.d_ff, spec.experts, seq_len=spec.seq_len)

    def forward(self, x: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` ``[samples, places, d_model]``, ``tasks`` ``[samples]``; beside the result what
        experts add to the loss."""
        x = x + self.attn(self.attn_norm(x), None, None)
        fed, more = self.ff(self.ff_norm(x), tasks)
        return x + fed, more


class Vision(nn.Module):
    """Some layers, with or without what comes before and after them."""

    spans_samples = False

    def __init__(
        self,
        spec: VisionSpec,
        layers: range | None = None,
        *,
        embed: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        held = range(spec.num_layers) if layers is None else layers
        self.units: dict[UnitName, Unit] = {}
        if embed:
            self.embed = nn.Linear(spec.vocab_size, spec.d_model, bias=False)
            self.positions = nn.Embedding(spec.seq_len, spec.d_model)
            self.units["embed"] = Unit(self.enter)
        self.layers = nn.ModuleDict({str(n): Block(spec) for n in held})
        self.units |= {int(n): Unit(block, block=block) for n, block in self.layers.items()}
        if head:
            self.norm = RMSNorm(spec.d_model, EPS)
            self.head = nn.Linear(spec.d_model, spec.num_classes, bias=False)
            self.cross_entropy = LinearCrossEntropy()
            self.units["head"] = Unit(self.norm)

    @property
    def module(self) -> nn.Module:
        return self

    def enter(self, patches: Tensor, context: Context) -> Tensor:
        """``[samples, places, pixels]`` to ``[samples, places, d_model]``."""
        result: Tensor = self.embed(patches) + self.positions(context.positions_of(patches))
        return result

    def compute(self, inputs: Tree, context: Context, /) -> Output:
        """Patches, or what crossed the border, to the same or to what the class is read from."""
        tasks, added = inputs["tasks"], list[Tensor]()
        if "embed" in self.units:
            x = self.units["embed"](inputs["patches"], context)
        else:
            x = inputs[STREAM]
        for name, unit in self.units.items():
            if isinstance(name, int):
                x, more = unit(x, tasks)
                added.append(more)
        if "head" in self.units:
            x = self.units["head"](x)
        total = torch.stack(added).sum()
        terms = {"experts": Term(total, torch.zeros_like(total.detach()))}
        return Output({STREAM: x, "tasks": tasks}, terms)


class Classes:
    """Of images, each in the way of its task."""

    def objective(self, last: Vision, /) -> FirstPlace:
        return FirstPlace(last)

    def border(self, spec: VisionSpec, seq_len: int, /) -> Border:
        """Hidden states, and a task for each sample."""
        hidden = (Dim(name="seq", size=seq_len), Dim(name="d_model", size=spec.d_model))
        return {STREAM: BorderTensor(hidden), "tasks": BorderTensor((), role="int64", form="batch")}

    def sizes(self, seq_len: int, /) -> Mapping[str, int]:
        return {"seq": seq_len}

    def weight_of_sample(self, _seq_len: int, /) -> float:
        return 1.0

    def buffers(self, spec: VisionSpec, /) -> Sequence[Buffer]:
        """How many tokens have gone to each expert of each layer."""
        value = partial(no_tokens, spec.experts.count)
        names = (f"layers.{number}.ff.tokens" for number in range(spec.num_layers))
        return [Buffer(name=name, rule="count", value=value, over="seq") for name in names]


class FirstPlace:
    """Cross-entropy among all tasks' classes, read where the image begins: nothing tells the model
    the task but the experts that it goes to."""

    def __init__(self, last: Vision) -> None:
        self.last = last

    def __call__(self, output: Tree, batch: Tree, /) -> Terms:
        weight, weights = self.last.head.weight, batch["weights"]
        total = self.last.cross_entropy(output[STREAM], weight, batch["targets"], weights)
        return {"class": Term(total, weights.sum(dtype=torch.float64))}
