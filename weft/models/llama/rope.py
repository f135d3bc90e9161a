"""How rotary positions are stretched: what a model may say, and how Hugging Face writes it. No
torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from weft.config.errors import ConfigError
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
        found = {"rope_type": scaling.kind, "factor": scaling.factor}
        found |= {name: value for name, value in own.items() if value is not None}
        if scaling.kind == "dynamic":
            length = original
        elif original is not None:
            found[_ORIGINAL] = original
    theta = {"rope_theta": spec.rope_theta, "rope_scaling": found}
    return {"max_position_embeddings": length, **theta}


def read_rope(fields: Fields) -> dict[str, Any]:
    """Length, base and stretching, from the form of transformers 5 or the older one."""
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
        scaling = RopeScaling(kind=kind, factor=rope.positive("factor"), **_own(kind, rope, length))
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
        "attention_factor": rope.positive_or_none("attention_factor"),
        "truncate": rope.flag("truncate", default=True),
    }
