"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, tied head."""

from __future__ import annotations

from torch import Tensor, nn

from weft.models.decoder import WHOLE, Decoder, Halves
from weft.models.decoder_spec import DecoderSpec
from weft.nn.attention import Attention
from weft.nn.context import Context
from weft.nn.documents import Packed
from weft.nn.dropout import Dropout
from weft.nn.feed_forward import GeluMLP
from weft.nn.stage import Part


class GPT2Block(nn.Module):
    """Pre-norm attention and feed-forward, each dropped and added to the residual stream; or one
    of them."""

    def __init__(self, spec: DecoderSpec, layer: int, halves: Halves = WHOLE) -> None:
        super().__init__()
        self._attends, self._feeds = halves
        if self._attends:
            self.attn_norm = nn.LayerNorm(spec.d_model, spec.norm_eps)
            self.attn = Attention(
                spec.d_model,
                spec.d_head,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                bias=True,
                out_bias=True,
            )
            self.attn_dropout = Dropout(spec.dropout, site=2 * layer + 1)
        if self._feeds:
            self.ff_norm = nn.LayerNorm(spec.d_model, spec.norm_eps)
            self.ff = GeluMLP(spec.d_model, spec.d_ff)
            self.ff_dropout = Dropout(spec.dropout, site=2 * layer + 2)
        self.attention, self.feed_forward = Part(self._attend), Part(self._feed)

    def forward(
        self, x: Tensor, packed: Packed | None, keys: Tensor | None, positions: Tensor
    ) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``; the rest as in ``Context``."""
        if self._attends:
            x = x + self.attn_dropout(self.attention(x, packed), keys, positions)
        if self._feeds:
            x = x + self.ff_dropout(self.feed_forward(x), keys, positions)
        return x

    def _attend(self, x: Tensor, packed: Packed | None) -> Tensor:
        result: Tensor = self.attn(self.attn_norm(x), None, packed)
        return result

    def _feed(self, x: Tensor) -> Tensor:
        result: Tensor = self.ff(self.ff_norm(x))
        return result


class GPT2(Decoder):
    """The whole model, or the part of it that one pipeline stage holds."""

    positions: nn.Embedding
    embed_dropout: Dropout

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
        positions = {"positions": nn.Embedding(spec.seq_len, spec.d_model)} if embed else {}
        super().__init__(
            spec,
            layers,
            embed=embed,
            head=head,
            cut=cut,
            first_row=first_row,
            block=lambda layer, halves: GPT2Block(spec, layer, halves),
            norm=lambda: nn.LayerNorm(spec.d_model, spec.norm_eps),
            **positions,
            embed_dropout=Dropout(spec.dropout, site=0),
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        keys, positions = context.dropout_keys, context.positions_of(x)
        if self.takes_tokens:
            x = self.units["embed"](x, context)  # [batch, seq, d_model]
        packed = None if context.documents is None else context.documents.packed
        for name in self.layers:
            x = self.units[int(name)](x, packed, keys, positions)
        return x if self.norm is None else self.units["head"](x)

    def embed_tokens(self, tokens: Tensor, context: Context) -> Tensor:
        assert self.embed is not None, "a stage that takes tokens holds the embedding"
        positions = context.positions_of(tokens)
        x = self.embed(tokens) + self.positions(positions)
        result: Tensor = self.embed_dropout(x, context.dropout_keys, positions)
        return result
