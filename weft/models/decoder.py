"""What the trainer needs of a model family: one stage of a decoder-only language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.decoder_spec import DecoderSpec
from weft.nn.context import Context
from weft.nn.experts.feed_forward import no_tokens
from weft.nn.losses import LinearCrossEntropy
from weft.nn.rows_loss import FOUND, RowsLoss, merged
from weft.nn.stage import (
    STREAM,
    Begun,
    Buffer,
    Objective,
    Output,
    Stage,
    Term,
    Terms,
    Tree,
    Unit,
)
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.model import UnitName

Halves = tuple[bool, bool]
"""Of a layer, which parts there are: attention, feed-forward."""
WHOLE: Halves = (True, True)


class Decoder(nn.Module, ABC):
    """Some consecutive layers, with or without the embedding before and the head after them.

    A family gives the parts and says how they follow one another. Parameters carry their logical
    names whatever the stage holds; a tied stage with the head and without the embedding holds
    its own ``embed.weight``.
    """

    spans_samples = False

    def __init__(
        self,
        spec: DecoderSpec,
        layers: range | None,
        *,
        embed: bool,
        head: bool,
        cut: tuple[bool, bool],
        first_row: int | None,
        block: Callable[[int, Halves], nn.Module],
        norm: Callable[[], nn.Module],
        **beside: nn.Module,
    ) -> None:
        """
        Args:
            spec: Of the whole model.
            layers: Those held; None: all.
            embed: It has the embedding: its input is tokens.
            head: It has the final norm and the head.
            cut: Of the first of these layers it lacks the first part; of the last the second.
            first_row: The head that it has is a part: rows of the vocabulary from this one on.
            block: Number of a layer, and which parts of it -> these.
            norm: Makes the final norm.
            beside: What else it has, by name.
        """
        super().__init__()
        self.spec = spec
        self.takes_tokens = embed
        table = embed or (head and spec.tied)
        self.embed = nn.Embedding(spec.vocab_size, spec.d_model) if table else None
        for name, part in beside.items():
            self.add_module(name, part)
        held = range(spec.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict(
            {
                str(n): block(n, (not cut[0] or n > held.start, not cut[1] or n < held.stop - 1))
                for n in held
            }
        )
        self.norm = norm() if head else None
        own_head = head and not spec.tied
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False) if own_head else None
        self.cross_entropy = _loss(first_row)
        self.units = self._declared_units()
        """Embedding, blocks, final norm: what ``forward`` calls, in order."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Tokens ``[batch, seq]`` int64 where the stage embeds, else ``[batch, seq, d_model]``.

        The result is ``[batch, seq, d_model]``, after the final norm where the stage has the head.
        """

    @abstractmethod
    def embed_tokens(self, tokens: Tensor, context: Context) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, d_model]``. Needs the embedding."""

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def compute(self, inputs: Tree, context: Context) -> Output:
        """``forward`` from tree to tree."""
        x = inputs["tokens" if self.takes_tokens else STREAM]
        return Output({STREAM: self(x, context)})

    def logits(self, hidden: Tensor) -> Tensor:
        """``[batch, seq, d_model]`` to ``[batch, seq, vocab]``. Needs the head."""
        return F.linear(hidden, self._head_weight())

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """``sum(weights * cross-entropy)`` over ``[batch, seq]``: a scalar sum, never a mean."""
        total: Tensor = self.cross_entropy(hidden, self._head_weight(), targets, weights)
        return total

    def part_objective(self, output: Tree, batch: Tree) -> Begun:
        """``NextToken`` of a part of the head."""
        targets, weights = batch["targets"], batch["weights"]
        found, rest = self.cross_entropy(output[STREAM], self._head_weight(), targets)

        def whole(parts: Sequence[Tree]) -> Terms:
            losses = rest(merged([part["found"] for part in parts]))
            total = (losses * weights.to(losses.dtype)).sum()
            return {"loss": Term(total, weights.sum(dtype=torch.float64))}

        return Begun({"found": found}, whole)

    def blocks(self) -> list[nn.Module]:
        """The layers held, in order."""
        return list(self.layers.values())

    def _declared_units(self) -> dict[UnitName, Unit]:
        units: dict[UnitName, Unit] = {}
        if self.takes_tokens:
            units["embed"] = Unit(self.embed_tokens, backward_reads=False)
        for name, block in self.layers.items():
            units[int(name)] = Unit(block, block=block)
        if self.norm is not None:
            units["head"] = Unit(self.norm)
        return units

    def _head_weight(self) -> Tensor:
        """``[vocab, d_model]``."""
        module = self.embed if self.head is None else self.head
        assert self.norm is not None and module is not None, "this stage does not hold the head"
        return module.weight


def _loss(first_row: int | None) -> nn.Module:
    """Of the whole head, or of its rows from one on."""
    return LinearCrossEntropy() if first_row is None else RowsLoss(first_row)


class LanguageModelling:
    """The task of every decoder."""

    def objective(self, last: Stage) -> Objective:
        """The next token's."""
        assert isinstance(last, Decoder), type(last)
        return NextToken(last)

    def border(self, spec: DecoderSpec, seq_len: int) -> Border:
        """Hidden states."""
        dims = (Dim(name="seq", size=seq_len), Dim(name="d_model", size=spec.d_model))
        return {STREAM: BorderTensor(dims)}

    def between_parts(self, seq_len: int) -> Border:
        """What parts of the head have found."""
        dims = (Dim(name="seq", size=seq_len), Dim(name="found", size=FOUND))
        return {"found": BorderTensor(dims, "wide", "batch")}

    def sizes(self, seq_len: int) -> Mapping[str, int]:
        """The length of samples."""
        return {"seq": seq_len}

    def weight_of_sample(self, seq_len: int) -> float:
        """Every token counts."""
        return float(seq_len)

    def buffers(self, spec: DecoderSpec) -> Sequence[Buffer]:
        """Of each layer of experts, how many tokens have gone to each of them."""
        if spec.experts is None:
            return ()
        value, step = partial(no_tokens, spec.experts.count), spec.experts.bias_step
        numbers = range(spec.experts.dense_layers, spec.num_layers)
        return [
            Buffer(
                name=f"{layer}.tokens",
                rule="count",
                value=value,
                over="seq",
                moves=None if step is None else (f"{layer}.router.bias", step),
            )
            for layer in (f"layers.{number}.ff" for number in numbers)
        ]


class NextToken:
    """The objective of a language model: the next token's cross-entropy, weighted by token."""

    def __init__(self, last: Decoder) -> None:
        self._last = last

    def __call__(self, output: Tree, batch: Tree) -> Terms:
        """``targets`` int64 and ``weights``, each ``[batch, seq]``, against hidden states."""
        weights = batch["weights"]
        total = self._last.loss(output[STREAM], batch["targets"], weights)
        return {"loss": Term(total, weights.sum(dtype=torch.float64))}
