"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, tied head."""

from __future__ import annotations

from torch import Tensor, nn

from weft.models.decoder import Decoder
from weft.models.decoder_spec import DecoderSpec
from weft.nn.attention import Attention
from weft.nn.context import Context, attention_mask
from weft.nn.dropout import Dropout
from weft.nn.feed_forward import GeluMLP
from weft.nn.losses import LinearCrossEntropy


class GPT2Block(nn.Module):
    """Pre-norm attention and feed-forward, each dropped and added to the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
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
        self.ff_norm = nn.LayerNorm(spec.d_model, spec.norm_eps)
        self.ff = GeluMLP(spec.d_model, spec.d_ff)
        self.ff_dropout = Dropout(spec.dropout, site=2 * layer + 2)

    def forward(
        self, x: Tensor, mask: Tensor | None, keys: Tensor | None, positions: Tensor
    ) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``; the rest as in ``Context``."""
        x = x + self.attn_dropout(self.attn(self.attn_norm(x), None, mask), keys, positions)
        x = x + self.ff_dropout(self.ff(self.ff_norm(x)), keys, positions)
        return x


class GPT2(Decoder):
    """The whole model, or the part of it that one pipeline stage holds.

    ``layers`` is the range of layers held (None: all).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layers: range | None = None,
        *,
        embed: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        d_model, vocab_size = spec.d_model, spec.vocab_size
        self.spec = spec
        self.takes_tokens = embed
        held = range(spec.num_layers) if layers is None else layers
        table = embed or (head and spec.tied)
        self.embed = nn.Embedding(vocab_size, d_model) if table else None
        self.positions = nn.Embedding(spec.seq_len, d_model) if embed else None
        self.embed_dropout = Dropout(spec.dropout, site=0)
        self.layers = nn.ModuleDict({str(i): GPT2Block(spec, i) for i in held})
        self.norm = nn.LayerNorm(d_model, spec.norm_eps) if head else None
        self.cross_entropy = LinearCrossEntropy()
        own_head = head and not spec.tied
        self.head = nn.Linear(d_model, vocab_size, bias=False) if own_head else None
        self.units = self._declared_units()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        keys, positions = context.dropout_keys, context.positions_of(x)
        if self.takes_tokens:
            x = self.units["embed"](x, context)  # [batch, seq, d_model]
        mask = attention_mask(context.segments)
        for name in self.layers:
            x = self.units[int(name)](x, mask, keys, positions)
        return x if self.norm is None else self.units["head"](x)

    def embed_tokens(self, tokens: Tensor, context: Context) -> Tensor:
        assert self.embed is not None and self.positions is not None, "the stage embeds"
        positions = context.positions_of(tokens)
        x = self.embed(tokens) + self.positions(positions)
        result: Tensor = self.embed_dropout(x, context.dropout_keys, positions)
        return result
