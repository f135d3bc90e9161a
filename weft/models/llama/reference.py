"""A Llama written out a second time: see ``weft.models.reference``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.decoder_spec import DecoderSpec
from weft.models.reference import Params, Reference, Samples, attend, next_token


def loss(spec: DecoderSpec, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """As in ``Reference``."""
    return _computed(spec, params, samples, {})


@torch.no_grad()
def settled(spec: DecoderSpec, params: Params, samples: Samples) -> Params:
    """Biases of experts: one that fewer tokens than the mean chose goes up, others down."""
    if spec.experts is None or spec.experts.bias_step is None:
        return {}
    chosen: dict[int, Tensor] = {}  # of each layer with experts: [samples, seq, experts]
    _computed(spec, params, samples, chosen)
    loads = {layer: each.double().sum((0, 1)) for layer, each in chosen.items()}
    return {
        name: params[name] + spec.experts.bias_step * torch.sign(load.mean() - load)
        for layer, load in loads.items()
        for name in [f"layers.{layer}.ff.router.bias"]
    }


def _computed(
    spec: DecoderSpec, params: Params, samples: Samples, chosen: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """The loss; ``chosen`` is told by layer which experts each token goes to."""
    x = params["embed.weight"][samples.tokens]  # [samples, seq, d_model]
    added = torch.zeros((), dtype=torch.float64)
    for layer in range(spec.num_layers):
        start = f"layers.{layer}."
        own = {n.removeprefix(start): p for n, p in params.items() if n.startswith(start)}
        y = _normed(x, own["attn_norm.weight"], spec.norm_eps)
        q, k, v = _through_low_ranks(y, own, spec) if spec.latent else _plain(y, own, spec)
        x = x + attend(q, k, v, samples.segments) @ own["attn.o.weight"].T
        y = _normed(x, own["ff_norm.weight"], spec.norm_eps)
        if spec.experts is None or layer < spec.experts.dense_layers:
            x = x + _fed(y, own, "ff.")
            continue
        mixed, more, chosen[layer] = _mixture(y, own, spec)
        x, added = x + mixed, added + more
    head = params["embed.weight" if spec.tied else "head.weight"]
    x = _normed(x, params["norm.weight"], spec.norm_eps)
    total, weight = next_token(x @ head.T, samples)
    return total + added, weight


def _fed(y: Tensor, own: Params, where: str, number: int | None = None) -> Tensor:
    """A SwiGLU; ``number``: one of several that are stacked."""
    names = (f"{where}{name}.weight" for name in ("gate", "up", "down"))
    into, up, down = (own[n] if number is None else own[n][number] for n in names)
    gate = y @ into.T
    return (gate * torch.sigmoid(gate) * (y @ up.T)) @ down.T


def _mixture(y: Tensor, own: Params, spec: DecoderSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Every expert computes every token, and most results are multiplied by nothing."""
    experts = spec.experts
    assert experts is not None
    logits = y @ own["ff.router.weight"].T  # [samples, seq, experts]
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    wanted = scores + own.get("ff.router.bias", torch.zeros(()))
    if experts.groups > 1:
        in_groups = wanted.reshape(*wanted.shape[:-1], experts.groups, -1)
        two = in_groups.sort(-1, descending=True).values[..., :2].sum(-1)
        is_kept = two >= two.sort(-1, descending=True).values[..., [experts.top_groups - 1]]
        width = experts.count // experts.groups
        wanted = wanted - 1e9 * (~is_kept).repeat_interleave(width, -1)
    seq = y.shape[1]
    least = wanted.sort(-1, descending=True).values[..., experts.top_k - 1 : experts.top_k]
    even = experts.top_k * spec.seq_len / experts.count
    is_chosen = is_kept = wanted >= least
    if experts.choice == "experts":  # so many tokens of every sample each, of equal ones the first
        places = torch.arange(seq)[:, None] / (2 * seq)
        wanted = torch.floor(wanted * 2**20 + 0.5) - places
        taken = min(math.floor(even), seq)
        least = wanted.sort(1, descending=True).values[:, taken - 1 : taken]
        is_chosen = is_kept = wanted >= least
    shares = scores * is_chosen
    if experts.normed:
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-300)
    if experts.capacity is not None:
        is_kept = is_chosen & (is_chosen.cumsum(1) <= math.floor(experts.capacity * even))
    shares = shares * is_kept * experts.scale
    each = torch.stack([_fed(y, own, "ff.", n) for n in range(experts.count)], -1)
    result = torch.einsum("nsde,nse->nsd", each, shares)
    if experts.shared_d_ff:
        shared = _fed(y, own, "ff.shared.ff.")
        if experts.shared_gate:
            shared = (y @ own["ff.shared.gate.weight"].T).sigmoid() * shared
        result = result + shared
    loads = is_chosen.double().sum(1) * experts.count / (experts.top_k * seq)
    means = (scores / scores.sum(-1, keepdim=True)).sum(1) / seq
    balance = seq * (loads * means).sum()
    more = experts.balance * balance + experts.z * logits.logsumexp(-1).pow(2).sum()
    return result, more, is_kept


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension (arXiv 1910.07467)."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _plain(y: Tensor, own: Params, spec: DecoderSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[samples, seq, heads, d_head]`` each."""
    q, k, v = (_heads(y, own, name, spec) for name in "qkv")
    return _turned(q, spec, spec.d_head), _turned(k, spec, spec.d_head), v


def _through_low_ranks(y: Tensor, own: Params, spec: DecoderSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Likewise (arXiv 2405.04434, section 2.1 and appendix C); pairs of channels with a position
    lie side by side."""
    low, heads = spec.latent, (*y.shape[:2], spec.num_heads, -1)
    assert low is not None
    d_nope = spec.d_head - low.d_rope
    if low.q_rank:
        down = y @ own["attn.q_down.weight"].T
        compressed = _normed(down, own["attn.q_norm.weight"], low.norm_eps)
        q = (compressed @ own["attn.q_up.weight"].T).reshape(heads)
    else:
        q = (y @ own["attn.q.weight"].T).reshape(heads)
    down = y @ own["attn.kv_down.weight"].T
    compressed = _normed(down[..., : low.kv_rank], own["attn.kv_norm.weight"], low.norm_eps)
    both = (compressed @ own["attn.kv_up.weight"].T).reshape(heads)
    halves = [*range(0, low.d_rope, 2), *range(1, low.d_rope, 2)]
    scaling, size = spec.rope_scaling, 1.0
    if scaling is not None and scaling.kind == "yarn":
        size = scaling.attention_factor or 1 + 0.1 * math.log(scaling.factor)
        spec = replace(spec, rope_scaling=replace(scaling, attention_factor=1.0))
    turned_q = _turned(q[..., d_nope:][..., halves], spec, low.d_rope)
    turned_k = _turned(down[..., None, low.kv_rank :][..., halves], spec, low.d_rope)
    q = torch.cat((q[..., :d_nope], turned_q), -1)
    k = torch.cat((both[..., :d_nope], turned_k.repeat(1, 1, spec.num_heads, 1)), -1)
    return size * q, size * k, both[..., d_nope:]


def _heads(y: Tensor, own: Params, name: str, spec: DecoderSpec) -> Tensor:
    """``[samples, seq, heads, d_head]``."""
    projected = F.linear(y, own[f"attn.{name}.weight"], own.get(f"attn.{name}.bias"))
    norm = own.get(f"attn.{name}_norm.weight")
    if norm is not None and spec.norms_all_heads:
        projected = _normed(projected, norm, spec.norm_eps)
    heads = projected.reshape(*y.shape[:2], -1, spec.d_head)
    return heads if norm is None or spec.norms_all_heads else _normed(heads, norm, spec.norm_eps)


def _turned(x: Tensor, spec: DecoderSpec, width: int) -> Tensor:
    """Rotary positions (arXiv 2104.09864) as a product of complex numbers: channel ``i`` of
    ``width`` is a real part, channel ``i + width / 2`` the imaginary one."""
    length = x.shape[1]
    frequencies = [_frequency(channel, length, spec, width) for channel in range(width // 2)]
    places = torch.arange(length, dtype=torch.float64)
    angles = places[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    scaling, size = spec.rope_scaling, 1.0
    if scaling is not None and scaling.kind == "yarn":  # of queries and of keys
        size = scaling.attention_factor or 1 + 0.1 * math.log(scaling.factor)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.full_like(angles, size), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _frequency(channel: int, length: int, spec: DecoderSpec, width: int) -> float:
    """How far a pair turns a token, after stretching."""
    scaling, base = spec.rope_scaling, spec.rope_theta
    plain = math.pow(base, -2 * channel / width)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    original = scaling.original_seq_len or 0
    if scaling.kind == "dynamic":  # another base, beyond the length first trained on
        reach = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        return math.pow(base * math.pow(reach, width / (width - 2)), -2 * channel / width)
    wave = 2 * math.pi / plain  # tokens a turn
    if scaling.kind == "yarn":
        return _by_parts(channel, plain, spec, width)
    # Llama 3.1's: short waves as they are, long ones ``factor`` times as long, between them from
    # one to the other.
    if wave < original / scaling.high_freq_factor:
        return plain
    if wave > original / scaling.low_freq_factor:
        return plain / scaling.factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    part = (original / wave - scaling.low_freq_factor) / span
    return (1 - part) * plain / scaling.factor + part * plain


def _by_parts(channel: int, plain: float, spec: DecoderSpec, width: int) -> float:
    """YaRN's: pairs up to the one that turns ``beta_fast`` times as they are, from that of
    ``beta_slow`` on slowed, between them from one to the other."""
    scaling = spec.rope_scaling
    assert scaling is not None and scaling.original_seq_len is not None
    original = scaling.original_seq_len

    def found(turns: float) -> float:
        """The channel that turns so often: base^(-2 channel / width) = 2 pi turns / tokens."""
        tokens = original / (2 * math.pi * turns)
        return width * math.log(tokens, spec.rope_theta) / 2

    low, high = found(scaling.beta_fast), found(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slowed = min(max((channel - low) / (high - low), 0.0), 1.0)
    return slowed * plain / scaling.factor + (1 - slowed) * plain


REFERENCE = Reference(loss=loss, settled=settled, tables=frozenset({"embed.weight"}))
