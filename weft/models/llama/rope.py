"""How rotary positions are stretched: what a model may say, and how Hugging Face writes it. No
torch."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from weft.config.errors import ConfigError, show
from weft.models.config_json import Fields
from weft.models.decoder_spec import DecoderSpec
from weft.plan.model import RopeScaling

_KEY = "model.rope_scaling"
_ORIGINAL = "original_max_position_embeddings"
_OWN = {
    "linear": (),
    "dynamic": ("original_seq_len",),
    "yarn": ("original_seq_len", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("original_seq_len", "low_freq_factor", "high_freq_factor"),
}
"""By kind, what it has beside a factor."""


def check_rope(spec: DecoderSpec) -> None:
    """Refuse a stretching that lacks something, or says what its kind has no use for."""
    scaling = spec.rope_scaling
    if scaling is None:
        return
    kind, said = scaling.kind, asdict(scaling)
    for field in fields(scaling):
        name, value = field.name, said[field.name]
        if name not in ("kind", "factor", *_OWN[kind]) and value != field.default:
            hint = f"{kind} has {', '.join(('factor', *_OWN[kind]))}."
            raise ConfigError(f"{_KEY}.{name}", value, f"nothing where kind is {kind}", hint)
    if scaling.original_seq_len is None and "original_seq_len" in _OWN[kind]:
        expected = f"an integer >= 1 where kind is {kind}"
        raise ConfigError(f"{_KEY}.original_seq_len", None, expected)
    _check_ramp(scaling, spec.rope_theta)


def _check_ramp(scaling: RopeScaling, theta: float) -> None:
    """It rises from one number to a greater one."""
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        expected = f"more than low_freq_factor ({scaling.low_freq_factor})"
        raise ConfigError(f"{_KEY}.high_freq_factor", scaling.high_freq_factor, expected)
    if scaling.beta_fast <= scaling.beta_slow:
        expected = f"more than beta_slow ({scaling.beta_slow})"
        raise ConfigError(f"{_KEY}.beta_fast", scaling.beta_fast, expected)
    if scaling.kind == "yarn" and theta <= 1:
        raise ConfigError("model.rope_theta", theta, "more than 1 where kind is yarn")


def written_rope(spec: DecoderSpec) -> dict[str, Any]:
    """Fields of a ``config.json``, as every version of transformers reads them. Dynamic scaling
    takes the length first trained on for the length of the model."""
    scaling, length, found = spec.rope_scaling, spec.seq_len, None
    if scaling is not None:
        said = asdict(scaling)
        own = {name: said[name] for name in _OWN[scaling.kind]}
        if own.get("truncate", False):
            del own["truncate"]  # as usual, and older versions do not know it
        original = own.pop("original_seq_len", None)
        if scaling.kind == "yarn" and spec.latent is not None:
            own |= _sharper_written(scaling)
        found = {"rope_type": scaling.kind, "factor": scaling.factor}
        found |= {name: value for name, value in own.items() if value is not None}
        if scaling.kind == "dynamic":
            length = original
        elif original is not None:
            found[_ORIGINAL] = original
    theta = {"rope_theta": spec.rope_theta, "rope_scaling": found}
    return {"max_position_embeddings": length, **theta}


def _sharper_written(scaling: RopeScaling) -> dict[str, Any]:
    """How DeepSeek's files say what all channels of queries and keys are multiplied by, where
    others mean those with a position."""
    factor, slope = scaling.attention_factor, 0.1 * math.log(scaling.factor)
    if factor == 1:
        return {"mscale": 0.0, "mscale_all_dim": 0.0}
    size = 1.0 if factor is None else (factor - 1) / slope
    return {"mscale": size, "mscale_all_dim": size, "attention_factor": None}


def _sharper_read(rope: Fields, scale: float) -> float | None:
    """The inverse."""
    size, of_all = rope.take("mscale", 0.0), rope.take("mscale_all_dim", 0.0)
    if size != of_all:
        expected = f"mscale_all_dim ({show(of_all)})"
        raise rope.refusal("mscale", size, expected, "Nothing else is implemented.")
    if not size:
        rope.must("attention_factor", 1.0)
        return 1.0
    rope.must("attention_factor", None)
    return None if size == 1 else 1 + 0.1 * size * math.log(scale)


def read_rope(fields: Fields, *, latent: bool) -> dict[str, Any]:
    """Length, base and stretching, from the form of transformers 5 or the older one. ``latent``:
    attention is through low ranks."""
    length = fields.whole("max_position_embeddings", 2048)
    theta = fields.positive("rope_theta", 10_000.0)
    rope = Fields(fields.inner("rope_scaling", "rope_parameters"), "config.json rope_scaling")
    theta = rope.positive("rope_theta", theta)
    kind = rope.take("rope_type", rope.take("type", "default"))
    scaling = None
    if kind != "default":
        if kind not in list(_OWN):
            known = ", ".join(f'"{name}"' for name in ("default", *_OWN))
            raise rope.refusal("rope_type", kind, f"one of {known}")
        factor = rope.positive("factor")
        own = _own(kind, rope, length)
        if latent and kind == "yarn":
            own["attention_factor"] = _sharper_read(rope, factor)
        elif kind == "yarn":
            own["attention_factor"] = rope.positive_or_none("attention_factor")
        scaling = RopeScaling(kind=kind, factor=factor, **own)
    rope.take("type")
    rope.finish()
    if kind == "dynamic" and scaling is not None:  # there it is the length first trained on
        length = round(scaling.factor * length)
    return {"seq_len": length, "rope_theta": theta, "rope_scaling": scaling}


def _own(kind: str, rope: Fields, length: int) -> dict[str, Any]:
    """What a kind has beside a factor."""
    if kind == "linear":
        return {}
    if kind == "dynamic":
        return {"original_seq_len": length}
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        return {name: rope.positive(name) for name in names} | {
            "original_seq_len": rope.whole(_ORIGINAL)
        }
    return {
        "original_seq_len": rope.whole(_ORIGINAL, length),
        "beta_fast": rope.positive("beta_fast", 32.0),
        "beta_slow": rope.positive("beta_slow", 1.0),
        "truncate": rope.flag("truncate", default=True),
    }
