"""The model, and what it is trained to do."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from families.encoder.sizes import EncoderSpec
from torch import Tensor, nn

from weft.nn.attention import Attention
from weft.nn.context import Context
from weft.nn.documents import Packed
from weft.nn.losses import LinearCrossEntropy
from weft.nn.stage import STREAM, Output, Term, Terms, Tree, Unit
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.model import UnitName

HIDDEN = 5
"""Tokens that are divisible by it are not looked at."""


Seen = Tensor | Packed | None
"""Of tokens: those of each sample that are not hidden, those of their documents, or all."""


class Masked(nn.Module):
    """Attention to the tokens that are not hidden."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.d_head = spec.d_head
        self.q, self.k, self.v, self.o = (
            nn.Linear(spec.d_model, spec.d_model, bias=False) for _ in "qkvo"
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return self.o(mixed.transpose(1, 2).flatten(2))


class Unmasked(Attention):
    """Attention to all tokens of a document."""

    def __init__(self, spec: EncoderSpec) -> None:
        heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        super().__init__(spec.d_model, spec.d_head, **heads)
        self.both_ways()

    def forward(self, x: Tensor, seen: Packed | None) -> Tensor:
        return super().forward(x, None, seen)


class FeedForward(nn.Module):
    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.attn_norm, self.ff_norm = nn.LayerNorm(spec.d_model), nn.LayerNorm(spec.d_model)
        self.attn, self.ff = (Masked if spec.hides else Unmasked)(spec), FeedForward(spec)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        x = x + self.attn(self.attn_norm(x), seen)
        return x + self.ff(self.ff_norm(x))


class Encoder(nn.Module):
    """Some layers, with or without what comes before and after them."""

    spans_samples = False

    def __init__(
        self,
        spec: EncoderSpec,
        layers: range | None = None,
        *,
        embed: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        held = range(spec.num_layers) if layers is None else layers
        self.spec = spec
        self.units: dict[UnitName, Unit] = {}
        if embed:
            self.embed = nn.Embedding(spec.vocab_size, spec.d_model)
            self.positions = nn.Embedding(spec.seq_len, spec.d_model)
            self.units["embed"] = Unit(self.enter, backward_reads=False)
        self.layers = nn.ModuleDict({str(n): Block(spec) for n in held})
        self.units |= {int(n): Unit(block, block=block) for n, block in self.layers.items()}
        if head:
            self.norm = nn.LayerNorm(spec.d_model)
            self.head = nn.Linear(spec.d_model, spec.num_classes, bias=False)
            self.cross_entropy = LinearCrossEntropy()
            self.units["head"] = Unit(self.norm)

    @property
    def module(self) -> nn.Module:
        return self

    def enter(self, tokens: Tensor, context: Context) -> Tensor:
        return self.embed(tokens) + self.positions(context.positions_of(tokens))

    def looked_at(self, seen: Tensor, context: Context) -> Seen:
        if self.spec.hides:
            return seen
        return context.documents.packed if self.spec.packed else None

    def compute(self, inputs: Tree, context: Context, /) -> Output:
        if "embed" in self.units:
            tokens = inputs["tokens"]
            x, seen = self.units["embed"](tokens, context), tokens % HIDDEN != 0
            seen[:, 0] = True
        else:
            x, seen = inputs[STREAM], inputs["seen"]
        for name, unit in self.units.items():
            if isinstance(name, int):
                x = unit(x, self.looked_at(seen, context))
        if "head" in self.units:
            x = self.units["head"](x)
        return Output({STREAM: x, "seen": seen})


class Classification:
    """Of whole samples, or of tokens."""

    def objective(self, last: Encoder, /) -> "FirstPlace":
        return EachPlace(last) if last.spec.packed else FirstPlace(last)

    def border(self, spec: EncoderSpec, seq_len: int, /) -> Border:
        hidden = (Dim(name="seq", size=seq_len), Dim(name="d_model", size=spec.d_model))
        seen = BorderTensor((Dim(name="places", size=seq_len),), role="bool")
        return {STREAM: BorderTensor(hidden), "seen": seen}

    def sizes(self, seq_len: int, /) -> Mapping[str, int]:
        return {"seq": seq_len}

    def weight_of_sample(self, _seq_len: int, /) -> float:
        return 1.0

    def buffers(self, _spec: EncoderSpec, /) -> tuple[()]:
        return ()


class FirstPlace:
    """Cross-entropy of the class, which is read where the sample begins."""

    def __init__(self, last: Encoder) -> None:
        self.last = last

    def __call__(self, output: Tree, batch: Tree, /) -> Terms:
        weight = self.last.head.weight
        classes = batch["targets"][:, -1:] % 5
        targets = classes.expand_as(batch["targets"])
        weights = torch.zeros_like(batch["weights"])
        weights[:, 0] = batch["weights"][:, 0]
        total = self.last.cross_entropy(output[STREAM], weight, targets, weights)
        return {"class": Term(total, weights.sum(dtype=torch.float64))}


class EachPlace:
    """Cross-entropy of a class for each token."""

    def __init__(self, last: Encoder) -> None:
        self.last = last

    def __call__(self, output: Tree, batch: Tree, /) -> Terms:
        weight, weights = self.last.head.weight, batch["weights"]
        total = self.last.cross_entropy(output[STREAM], weight, batch["targets"] % 5, weights)
        return {"classes": Term(total, weights.sum(dtype=torch.float64))}
