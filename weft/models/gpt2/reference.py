"""A GPT-2 written out a second time: see ``weft.models.reference``."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.models.decoder_spec import DecoderSpec
from weft.models.reference import Params, Reference, Samples, attend, next_token

_Words = NDArray[np.uint64]


def loss(spec: DecoderSpec, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """As in ``Reference``."""
    seq = samples.tokens.shape[1]
    x = params["embed.weight"][samples.tokens] + params["positions.weight"][:seq]
    x = _dropped(x, spec, samples, site=0)  # [samples, seq, d_model]
    for layer in range(spec.num_layers):
        linear, norm = _parts(params, f"layers.{layer}.", spec)
        y = norm("attn_norm", x)
        heads = (*y.shape[:2], spec.num_heads, spec.d_head)
        q, k, v = (linear(f"attn.{name}", y).reshape(heads) for name in "qkv")
        mixed = linear("attn.o", attend(q, k, v, samples.segments))
        x = x + _dropped(mixed, spec, samples, site=2 * layer + 1)
        y = linear("ff.down", _gelu(linear("ff.up", norm("ff_norm", x))))
        x = x + _dropped(y, spec, samples, site=2 * layer + 2)
    _, norm = _parts(params, "", spec)
    head = params["embed.weight" if spec.tied else "head.weight"]
    return next_token(norm("norm", x) @ head.T, samples)


_Part = Callable[[str, Tensor], Tensor]


def _parts(params: Params, start: str, spec: DecoderSpec) -> tuple[_Part, _Part]:
    """A matrix with its bias, and a norm with its own, by the name after ``start``."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, params[f"{start}{name}.weight"], params[f"{start}{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        weight, bias = params[f"{start}{name}.weight"], params[f"{start}{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, spec.norm_eps)

    return linear, norm


def _gelu(x: Tensor) -> Tensor:
    """The form with tanh, of the original."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _dropped(x: Tensor, spec: DecoderSpec, samples: Samples, *, site: int) -> Tensor:
    """Elements of ``[samples, seq, d_model]`` at zero, the others enlarged: which ones follows from
    seed, step, sample, site, place and channel."""
    if not spec.dropout:
        return x
    run = _begun(int(_begun(samples.seed)[0]) ^ samples.step)
    keys = _mixed(_mixed(samples.numbers.numpy().astype(np.uint64)) ^ run)
    places = np.arange(x.shape[1], dtype=np.uint64)
    words = _mixed(_mixed(keys + _begun(site))[:, None] ^ places)[..., None]  # of one token each
    bits = np.arange(x.shape[2], dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits = bits ^ words.astype(np.uint32)
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = bits + (words >> np.uint64(32)).astype(np.uint32)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    bits = (bits ^ (bits >> np.uint32(16))) & np.uint32(0x7FFFFFFF)
    is_kept = torch.from_numpy(bits >= round(spec.dropout * 2**31))
    return torch.where(is_kept, x / (1 - spec.dropout), 0.0)


def _begun(x: int) -> _Words:
    """One step of splitmix64's sequence from ``x``: an array of one."""
    return _mixed(np.array([x % 2**64], np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def _mixed(x: _Words) -> _Words:
    """What splitmix64 ends with, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


REFERENCE = Reference(loss=loss, tables=frozenset({"embed.weight", "positions.weight"}))
