"""The model families by name. Imports torch only when a model is built or converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from weft.config.errors import ConfigError
from weft.models.gpt2 import layout as gpt2_layout
from weft.models.gpt2 import sizes as gpt2_sizes
from weft.models.llama import layout as llama_layout
from weft.models.llama import sizes as llama_sizes
from weft.plan.layout import Layout
from weft.plan.model import ModelSpec, ParamSpec

if TYPE_CHECKING:
    from weft.config.sections import ModelConfig
    from weft.models.decoder import Decoder


Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One folder under ``weft.models``."""

    name: str
    sizes: Mapping[str, ModelSpec]
    """Rows by name; ``vocab_size`` and ``seq_len`` as published."""
    param_specs: Callable[[ModelSpec], list[ParamSpec]]
    layout: Callable[[ModelSpec], dict[str, Layout]]
    """Tensor-parallel layout by module name."""
    check: Callable[[ModelSpec], None]
    """Raises ConfigError for a shape the family cannot have."""
    model: Callable[[], type[Decoder]]
    """The model class; called as ``model()(spec, layers, embed=..., head=...)``."""


def _llama() -> type[Decoder]:
    from weft.models.llama.model import Llama

    return Llama


def _gpt2() -> type[Decoder]:
    from weft.models.gpt2.model import GPT2

    return GPT2


FAMILIES: dict[str, Family] = {
    "llama": Family(
        name="llama",
        sizes=llama_sizes.SIZES,
        param_specs=llama_sizes.param_specs,
        layout=llama_layout.layout,
        check=llama_sizes.check,
        model=_llama,
    ),
    "gpt2": Family(
        name="gpt2",
        sizes=gpt2_sizes.SIZES,
        param_specs=gpt2_sizes.param_specs,
        layout=gpt2_layout.layout,
        check=gpt2_sizes.check,
        model=_gpt2,
    ),
}


def build_model(
    spec: ModelSpec, layers: range | None = None, *, embed: bool = True, head: bool = True
) -> Decoder:
    """One stage of a model on the current default device; its values are not yet meaningful."""
    return FAMILIES[spec.family].model()(spec, layers, embed=embed, head=head)


def model_spec(config: ModelConfig, vocab_size: int, seq_len: int) -> ModelSpec:
    """The row the user named, with overrides, the tokenizer's vocabulary and the data's length.

    Raises ConfigError for an unknown family or size and for a shape that cannot be built.
    """
    family = _named("model.family", config.family, FAMILIES)
    row = _named("model.size", config.size, family.sizes)
    asked: dict[str, Any] = {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "d_head": config.d_head,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "dropout": config.dropout,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    spec = replace(row, vocab_size=vocab_size, seq_len=seq_len, **given)
    check_spec(spec)
    return spec


def check_spec(spec: ModelSpec) -> None:
    """Refuse, as ConfigError, a shape that cannot be built."""
    positive = ("d_model", "d_ff", "d_head", "num_layers", "num_heads", "num_kv_heads")
    sizes = (
        spec.d_model,
        spec.d_ff,
        spec.d_head,
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
    )
    for name, value in zip(positive, sizes, strict=True):
        if value < 1:
            raise ConfigError(f"model.{name}", value, "an integer >= 1")
    if spec.vocab_size < 2:
        raise ConfigError("data.vocab_size", spec.vocab_size, "an integer >= 2")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            "model.num_kv_heads", spec.num_kv_heads, f"a divisor of num_heads ({spec.num_heads})"
        )
    if not 0 <= spec.dropout < 1:
        raise ConfigError("model.dropout", spec.dropout, "a number >= 0 and < 1")
    FAMILIES[spec.family].check(spec)


def _named(key: str, name: str, rows: Mapping[str, Row]) -> Row:
    if name in rows:
        return rows[name]
    near = get_close_matches(name, rows, n=1)
    hint = f"Did you mean {near[0]}?" if near else ""
    raise ConfigError(key, name, f"one of {', '.join(rows)}", hint)
