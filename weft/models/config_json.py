"""Hugging Face's ``config.json``, read so that no field is passed over. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weft.config.errors import ConfigError, show
from weft.plan.model import ModelSpec

Spec = TypeVar("Spec", bound=ModelSpec)

_LARGEST = sys.float_info.max
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "attn_pdrop",  # training only; Weft drops the residual stream and the embedding
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",  # no effect unless a sliding window is used
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",  # the order of rounding, not the formula
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that do not change what the model computes."""


class Fields:
    """The fields of one object of a ``config.json``, each to be taken or left over."""

    def __init__(self, data: Mapping[str, Any], where: str = "config.json") -> None:
        self._left = dict(data)
        self._where = where

    def take(self, name: str, default: Any = None) -> Any:
        """The value, whatever it is; ``default`` where it is absent or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        return int(self._checked(name, value, type(value) is int and value >= 1, "an integer >= 1"))

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        fits = type(value) in (int, float) and 0 < value <= _LARGEST
        return float(self._checked(name, value, fits, "a finite number > 0"))

    def positive_or_none(self, name: str) -> float | None:
        """None where it is absent or null."""
        return None if self._left.get(name) is None else self.positive(name)

    def part(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        fits = type(value) in (int, float) and 0 <= value < 1
        return float(self._checked(name, value, fits, "a number >= 0 and < 1"))

    def inner(self, *names: str) -> dict[str, Any]:
        """The objects of these names together, each where it is not absent or null."""
        found: dict[str, Any] = {}
        for name in names:
            value = self.take(name, {})
            found |= self._checked(name, value, isinstance(value, dict), "an object")
        return found

    def words(self, name: str) -> list[str]:
        """A list of texts; empty where it is absent or null."""
        value = self.take(name, [])
        fits = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return list(self._checked(name, value, fits, "a list of texts"))

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.take(name, default)
        return bool(self._checked(name, value, type(value) is bool, "true or false"))

    def _checked(self, name: str, value: Any, fits: bool, expected: str) -> Any:
        if not fits:
            raise self.refusal(name, value, expected)
        return value

    def must(self, name: str, *allowed: Any) -> None:
        """Refuse any other value; absent or null stands for the first."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            expected = " or ".join(map(show, allowed))
            raise self.refusal(name, value, expected, "Nothing else is implemented.")

    def finish(self) -> None:
        """Refuse what was not taken: it might change what the model computes."""
        for name, value in self._left.items():
            if value not in (None, False) and name not in HARMLESS:
                hint = f"Weft does not know {name}. If the numbers do not depend on it, remove it."
                raise self.refusal(name, value, "no such field", hint)

    def refusal(self, name: str, value: object, expected: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self._where} {name}", value, expected, hint)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a Hugging Face file: ours side by side along its last dimension."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Matrices are stored ``[in, out]``, ours are ``[out, in]``."""
    at: int | None = None
    """It is this element of ours along the first dimension, not all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converter(Generic[Spec]):
    """How one family is written in Hugging Face's files."""

    architectures: tuple[str, ...]
    """Values of ``architectures`` that this family can read."""
    prefix: str
    """Which older files leave out of every name but the head's."""
    from_fields: Callable[[str, Fields], Spec]
    """(architecture, fields) -> shape. Raises ConfigError for what is not implemented."""
    to_fields: Callable[[Spec], dict[str, Any]]
    """Raises ConfigError for a shape that no architecture has."""
    entries: Callable[[Spec], list[Entry]]
    ignored: tuple[str, ...]
    """Ends of names of tensors that hold nothing learned."""
