"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and what shares its shape: Qwen 2.5, Qwen 3,
with experts Mixtral (arXiv 2401.04088), OLMoE (arXiv 2409.02060) and the mixtures of Qwen, and with
experts and latent attention DeepSeek-V3 (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.models.decoder import WHOLE, Decoder, Halves
from weft.models.decoder_spec import DecoderSpec
from weft.nn.attention import Attention
from weft.nn.context import Context
from weft.nn.documents import Packed
from weft.nn.experts.feed_forward import Experts
from weft.nn.feed_forward import SwiGLU
from weft.nn.latent_attention import LatentAttention
from weft.nn.norm import RMSNorm
from weft.nn.rope import Rotary, Rotation
from weft.nn.rope_scaling import sharpness
from weft.nn.stage import STREAM, Output, Part, Term, Tree


class LlamaBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; or one of them."""

    def __init__(self, spec: DecoderSpec, layer: int, halves: Halves = WHOLE) -> None:
        super().__init__()
        self._attends, self._feeds = halves
        if self._attends:
            self.attn_norm = RMSNorm(spec.d_model, spec.norm_eps)
            self.attn = _attention(spec)
        if self._feeds:
            self.ff_norm = RMSNorm(spec.d_model, spec.norm_eps)
            self.ff = _feed_forward(spec, layer)
        self.attention, self.feed_forward = Part(self._attend), Part(self._feed)

    def forward(
        self, x: Tensor, turn: Rotation, packed: Packed | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``x`` and result: ``[batch, seq, d_model]``; beside it what experts add to the loss."""
        if self._attends:
            x = x + self.attention(x, turn, packed)
        if not self._feeds:
            return x
        fed = self.feed_forward(x)
        return x + fed if isinstance(fed, Tensor) else (x + fed[0], fed[1])

    def _attend(self, x: Tensor, turn: Rotation, packed: Packed | None) -> Tensor:
        result: Tensor = self.attn(self.attn_norm(x), turn, packed)
        return result

    def _feed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        result: Tensor | tuple[Tensor, Tensor] = self.ff(self.ff_norm(x))
        return result


def _attention(spec: DecoderSpec) -> nn.Module:
    if spec.latent is not None:
        return LatentAttention(
            spec.d_model,
            spec.d_head,
            spec.latent,
            num_heads=spec.num_heads,
            sharpness=sharpness(spec.rope_scaling),
        )
    return Attention(
        spec.d_model,
        spec.d_head,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        bias=spec.qkv_bias,
        qk_norm_eps=spec.norm_eps if spec.qk_norm else None,
        norms_all_heads=spec.norms_all_heads,
    )


def _rotary(spec: DecoderSpec) -> Rotary:
    """Of those channels that have a position; where not all have, stretching makes attention
    sharper by itself."""
    if spec.latent is None:
        return Rotary(spec.d_head, theta=spec.rope_theta, scaling=spec.rope_scaling)
    scaling = spec.rope_scaling and replace(spec.rope_scaling, attention_factor=1.0)
    return Rotary(spec.latent.d_rope, theta=spec.rope_theta, scaling=scaling)


def _feed_forward(spec: DecoderSpec, layer: int) -> nn.Module:
    experts = spec.experts_of(layer)
    if experts is None:
        return SwiGLU(spec.d_model, spec.d_ff)
    return Experts(spec.d_model, experts.d_ff or spec.d_ff, experts, seq_len=spec.seq_len)


class Llama(Decoder):
    """The whole model, or the part of it that one pipeline stage holds."""

    rotary: Rotary

    def __init__(
        self,
        spec: DecoderSpec,
        layers: range | None = None,
        *,
        embed: bool = True,
        head: bool = True,
        cut: tuple[bool, bool] = (False, False),
        first_row: int | None = None,
    ) -> None:
        super().__init__(
            spec,
            layers,
            embed=embed,
            head=head,
            cut=cut,
            first_row=first_row,
            block=lambda layer, halves: LlamaBlock(spec, layer, halves),
            norm=lambda: RMSNorm(spec.d_model, spec.norm_eps),
            rotary=_rotary(spec),
        )

    def compute(self, inputs: Tree, context: Context) -> Output:
        """Also what experts add to the loss, in the weights of the tokens."""
        added: list[Tensor] = []
        x = self(inputs["tokens" if self.takes_tokens else STREAM], context, added)
        if not added:
            return Output({STREAM: x})
        total = torch.stack(added).sum()
        return Output({STREAM: x}, {"experts": Term(total, torch.zeros_like(total.detach()))})

    def forward(self, x: Tensor, context: Context, added: list[Tensor] | None = None) -> Tensor:
        """``added`` is given what layers add to the loss, where they do."""
        if self.takes_tokens:
            x = self.units["embed"](x, context)  # [batch, seq, d_model]
        positions = context.positions_of(x)
        turn = self.rotary(positions, x.dtype, positions.shape[1])
        packed = None if context.documents is None else context.documents.packed
        for name in self.layers:
            x = self.units[int(name)](x, turn, packed)
            if isinstance(x, tuple):
                x, more = x
                if added is not None:
                    added.append(more)
        return x if self.norm is None else self.units["head"](x)

    def embed_tokens(self, tokens: Tensor, context: Context) -> Tensor:  # noqa: ARG002 - rotary
        assert self.embed is not None, "a stage that takes tokens holds the embedding"
        result: Tensor = self.embed(tokens)
        return result
