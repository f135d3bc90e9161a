"""A Llama written out a second time: see ``weft.models.reference``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.decoder_spec import DecoderSpec
from weft.models.reference import Params, Reference, Samples, attend, next_token


def loss(spec: DecoderSpec, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """As in ``Reference``."""
    x = params["embed.weight"][samples.tokens]  # [samples, seq, d_model]
    for layer in range(spec.num_layers):
        start = f"layers.{layer}."
        own = {n.removeprefix(start): p for n, p in params.items() if n.startswith(start)}
        y = _normed(x, own["attn_norm.weight"], spec)
        q, k, v = (_heads(y, own, name, spec) for name in "qkv")
        if spec.qk_norm:
            q = _normed(q, own["attn.q_norm.weight"], spec)
            k = _normed(k, own["attn.k_norm.weight"], spec)
        mixed = attend(_turned(q, spec), _turned(k, spec), v, samples.segments)
        x = x + mixed @ own["attn.o.weight"].T
        y = _normed(x, own["ff_norm.weight"], spec)
        gate, up = y @ own["ff.gate.weight"].T, y @ own["ff.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ own["ff.down.weight"].T
    head = params["embed.weight" if spec.tied else "head.weight"]
    return next_token(_normed(x, params["norm.weight"], spec) @ head.T, samples)


def _normed(x: Tensor, weight: Tensor, spec: DecoderSpec) -> Tensor:
    """Over the last dimension (arXiv 1910.07467)."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps) * weight


def _heads(y: Tensor, own: Params, name: str, spec: DecoderSpec) -> Tensor:
    """``[samples, seq, heads, d_head]``."""
    projected = F.linear(y, own[f"attn.{name}.weight"], own.get(f"attn.{name}.bias"))
    return projected.reshape(*y.shape[:2], -1, spec.d_head)


def _turned(x: Tensor, spec: DecoderSpec) -> Tensor:
    """Rotary positions (arXiv 2104.09864) as a product of complex numbers: channel ``i`` of a head
    is a real part, channel ``i + d_head / 2`` the imaginary one."""
    channels = range(spec.d_head // 2)
    frequencies = [_frequency(spec.rope_theta ** (-2 * i / spec.d_head), spec) for i in channels]
    places = torch.arange(x.shape[1], dtype=torch.float64)
    angles = places[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _frequency(frequency: float, spec: DecoderSpec) -> float:
    """Llama 3.1's: short waves as they are, long ones ``factor`` times as long, between them from
    one to the other."""
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    wave = 2 * math.pi / frequency  # tokens a turn
    if wave < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wave > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    part = (scaling.original_seq_len / wave - scaling.low_freq_factor) / span
    return (1 - part) * frequency / scaling.factor + part * frequency


REFERENCE = Reference(loss=loss, tables=frozenset({"embed.weight"}))
