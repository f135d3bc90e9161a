"""What a configuration may hold, as a tree of nodes: keys, and in words what values must be.

Derived from the sections through their JSON schema, so that an error message, an editor and the
checks themselves cannot disagree.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from weft.config.names import every_name
from weft.config.sections import Config

_OTHER_NAMES = {
    "batch_size": "batch.samples",
    "batch.size": "batch.samples",
    "global_batch_size": "batch.samples",
    "micro_batch_size": "batch.micro",
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "learning_rate": "optim.lr",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "warmup_steps": "optim.schedule.warmup",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.d_ff",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "dataset": "data.path",
    "max_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "dtype": "compute.precision",
    "save_steps": "checkpoint.every",
    "eval_steps": "train.eval_every",
    "logging_steps": "train.log_every",
    "world_size": "plan.shares",
    "pipeline_schedule": "plan.schedule",
    "micro_batch": "batch.micro",
}
"""What other trainers call our keys, for the hint of an unknown key."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One place of the configuration."""

    kind: Literal["section", "choice", "list", "number", "text", "flag"]
    """``choice``: one of several sections, told apart by one of their keys."""
    expected: str
    """Completes "expected ..."."""
    nullable: bool = False
    fields: Mapping[str, Node] = field(default_factory=dict)
    """Of a section."""
    variants: Mapping[str, Node] = field(default_factory=dict)
    """Of a choice: value of ``key`` -> section."""
    key: str = "kind"
    """Of a choice: what tells its sections apart."""
    default_variant: str = ""
    items: Node | None = None
    """Of a list."""
    words: tuple[str, ...] = ()
    """Allowed texts, where only some are; of a choice, the values of ``key``."""

    @property
    def shorthands(self) -> tuple[str, ...]:
        """Optional sections of this one: their name alone, in its place, is them by default."""
        inside = self.fields.items() if self.kind == "section" else ()
        return tuple(name for name, node in inside if node.kind == "section" and node.nullable)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Every dotted key below this node, sections included."""
        for variant in self.variants.values():
            yield from variant.keys(prefix)
        for name, child in self.fields.items():
            yield prefix + name
            yield from child.keys(f"{prefix}{name}.")

    def child(self, name: str) -> Node | None:
        """What ``name`` is inside a section, or inside any section of a choice."""
        for section in (self, *self.variants.values()):
            if name in section.fields:
                return section.fields[name]
        return None

    def at(self, key: str) -> Node | None:
        """The node of a dotted key; None for an unknown one."""
        node: Node | None = self
        for name in key.split("."):
            node = node.child(name) if node is not None else None
        return node


def node_of(model: type[BaseModel]) -> Node:
    """What a file may hold that is read as ``model``."""
    return _node_of(model, every_name())


@cache
def _node_of(model: type[BaseModel], names: tuple[str, ...]) -> Node:  # noqa: ARG001
    """Kept as long as no name is added."""
    schema = model.model_json_schema()
    return _node(schema, schema["$defs"])


def root() -> Node:
    """The whole configuration."""
    return node_of(Config)


def nearest_key(key: str, siblings: Sequence[str] = (), top: Node | None = None) -> str:
    """The real key that an unknown one most likely means; empty when none is near.

    ``siblings``: the dotted keys that do exist in the section where the unknown one stands.
    ``top``: of the file; without it, the configuration.
    """
    top = top or root()
    leaf = key.rpartition(".")[2]
    renamed = _OTHER_NAMES.get(key, _OTHER_NAMES.get(leaf, "")) if top is root() else ""
    keys = list(dict.fromkeys(top.keys()))
    by_leaf = {other.rpartition(".")[2]: other for other in reversed(keys)}
    same_leaf = [other for other in keys if other.rpartition(".")[2] == leaf]
    guesses = (
        [renamed] if renamed else [],
        difflib.get_close_matches(key, siblings, n=1, cutoff=_cutoff(key)),
        difflib.get_close_matches(key, same_leaf, n=1, cutoff=0),
        difflib.get_close_matches(key, keys, n=1, cutoff=_cutoff(key)),
        [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)],
    )
    return next((guess[0] for guess in guesses if guess), "")


def _cutoff(key: str) -> float:
    """Part of the letters that must agree, so that the part after the last dot agrees by 0.6."""
    return 1 - 0.4 * len(key.rpartition(".")[2]) / len(key)


def _node(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Node:
    nullable = {"type": "null"} in schema.get("anyOf", ())
    if nullable:
        (schema,) = (option for option in schema["anyOf"] if option != {"type": "null"})
    default = schema.get("default")
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    null = ", or null" if nullable else ""
    if "discriminator" in schema:
        key, mapping = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
        return Node(
            kind="choice",
            expected=f"a section whose {key} is {one_of(mapping)}{null}",
            key=key,
            nullable=nullable,
            words=tuple(mapping),
            variants={kind: _node({"$ref": ref}, defs) for kind, ref in mapping.items()},
            default_variant=default[key] if default else "",
        )
    if schema["type"] == "object":
        fields = {name: _node(child, defs) for name, child in schema["properties"].items()}
        expected = f"a section with keys of {', '.join(fields)}{null}"
        section = Node(kind="section", expected=expected, nullable=nullable, fields=fields)
        words = "".join(f", or {name!r}" for name in section.shorthands)
        return replace(section, expected=expected + words)
    return _leaf(schema, defs, nullable=nullable)


def _leaf(schema: Mapping[str, Any], defs: Mapping[str, Any], *, nullable: bool) -> Node:
    null = ", or null" if nullable else ""
    words = tuple(schema.get("enum", ())) or ((schema["const"],) if "const" in schema else ())
    match schema["type"]:
        case "integer" | "number" as name:
            expected = f"{'an' if name == 'integer' else 'a'} {name}{_bounds(schema)}{null}"
            return Node(kind="number", expected=expected, nullable=nullable)
        case "string":
            expected = (one_of(words) if words else "text") + null
            return Node(kind="text", expected=expected, nullable=nullable, words=words)
        case "boolean":
            return Node(kind="flag", expected="true or false" + null, nullable=nullable)
        case "array":
            item = schema.get("items") or schema["prefixItems"][0]
            items = _node(item, defs)
            expected = f"a list of {_how_many(schema)}{_several(items)}{null}"
            return Node(kind="list", expected=expected, nullable=nullable, items=items)
    raise AssertionError(f"no words for the schema {schema}")


def one_of(words: Iterable[str]) -> str:
    """``'a', 'b' or 'c'``."""
    quoted = [repr(word) for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


def _bounds(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    return " " + " and ".join(limits) if limits else ""


def _how_many(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if low == high:
        return f"{low} "
    return "one or more " if low == 1 else ""


def _several(items: Node) -> str:
    if items.words:
        return f"of {items.expected}"
    article, _, rest = items.expected.partition(" ")
    if article not in ("a", "an"):
        return f"{items.expected}s"
    noun, _, rest = rest.partition(" ")
    return f"{noun}s {rest}".strip()
