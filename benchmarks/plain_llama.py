"""A Llama as one would write it in a single file of plain PyTorch: the yardstick."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.plan.model import ModelSpec


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. ``x``: ``[batch, heads, seq, d_head]``; cos, sin: ``[seq, d_head]``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Block(nn.Module):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        d, kv = spec.d_model, spec.num_kv_heads * spec.d_head
        self.d_head = spec.d_head
        self.attn_norm = nn.RMSNorm(d, eps=spec.norm_eps)
        self.q = nn.Linear(d, spec.num_heads * spec.d_head, bias=False)
        self.k = nn.Linear(d, kv, bias=False)
        self.v = nn.Linear(d, kv, bias=False)
        self.o = nn.Linear(spec.num_heads * spec.d_head, d, bias=False)
        self.ff_norm = nn.RMSNorm(d, eps=spec.norm_eps)
        self.gate = nn.Linear(d, spec.d_ff, bias=False)
        self.up = nn.Linear(d, spec.d_ff, bias=False)
        self.down = nn.Linear(spec.d_ff, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``."""
        h = self.attn_norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.ff_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainLlama(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocab]``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        frequency = spec.rope_theta ** (-torch.arange(0, spec.d_head, 2) / spec.d_head)
        angle = torch.outer(torch.arange(spec.seq_len).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of ``tokens`` ``[batch, seq + 1]``."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
