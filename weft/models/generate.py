"""Sampling from a model, a token at a time. Simple: each token reads its whole context again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.config.errors import ConfigError
from weft.models.decoder_spec import DecoderSpec
from weft.nn.context import Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn, and when that ends."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token and draws nothing."""
    top_p: float | None = None
    """Draws from the smallest set of likeliest tokens whose probabilities sum to it."""
    seed: int = 0
    """Of the draws, which are made on the CPU: it means the same on every device."""
    end_id: int | None = None
    """A row that has drawn it is filled up with it; where all rows have, the text ends early."""


class Writer(Protocol):
    """A model as far as writing with it goes: a ``Decoder``, or something like one."""

    spec: DecoderSpec

    def __call__(self, tokens: Tensor, context: Context, /) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, d_model]``."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        """``[batch, d_model]`` to ``[batch, vocab]``."""

    def parameters(self) -> Iterator[Tensor]:
        """At least one, on the device that computes."""


def generate(model: Writer, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Continue every row of ``tokens`` ``[batch, length]``; ``[batch, length + new]`` on the CPU.

    As ``stream``, which draws the tokens.

    Raises ConfigError: an empty prompt.
    """
    new = stream(model, tokens, sampling)
    return torch.cat((tokens.cpu().long(), *(chosen[:, None] for chosen in new)), dim=1)


@torch.no_grad()
def stream(model: Writer, tokens: Tensor, sampling: Sampling) -> Iterator[Tensor]:
    """The next token of every row of ``tokens`` ``[batch, length]``, then the one after it, and so
    on: ``[batch]`` each, on the CPU.

    Of a context longer than the model's ``seq_len`` the end is read.

    Raises ConfigError: an empty prompt.
    """
    if not tokens.shape[1]:
        raise ConfigError("prompt", "", "text of at least one token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    read = tokens.cpu().long()
    ended = torch.zeros(len(read), dtype=torch.bool)
    for _ in range(sampling.max_new_tokens):
        hidden = model(read[:, -model.spec.seq_len :].to(device), Context())
        logits = model.logits(hidden[:, -1]).double().cpu()  # [batch, vocab]
        chosen = _choose(logits, sampling, generator)
        if sampling.end_id is not None:
            chosen[ended] = sampling.end_id
            ended |= chosen == sampling.end_id
        yield chosen
        if ended.all():
            return
        read = torch.cat((read, chosen[:, None]), dim=1)


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token for each row of ``logits`` ``[batch, vocab]``."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    below = logits - logits.amax(-1, keepdim=True)  # a small temperature has no room for more
    probabilities = torch.softmax(below / sampling.temperature, dim=-1)
    if sampling.top_p is not None:
        probabilities = _likeliest(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _likeliest(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens, the one that reaches ``top_p`` included."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, kept)
