"""What a configuration may hold, as a tree of nodes: keys, and in words what values must be.

Derived from the sections through their JSON schema, so that an error message, an editor and the
checks themselves cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import BaseModel

from weft.config.names import every_name, nearest
from weft.config.sections import Config
from weft.config.tree import Entry
from weft.config.values import MOST

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
    "rms_norm_eps": "model.norm_eps",
    "layer_norm_epsilon": "model.norm_eps",
    "tie_word_embeddings": "model.tied",
    "init_from": "init",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "dataset": "data.path",
    "max_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "dtype": "compute.precision",
    "save_steps": "checkpoint.every",
    "eval_steps": "train.eval_every",
    "eval.every": "train.eval_every",
    "logging_steps": "train.log_every",
    "world_size": "plan.shares",
    "pipeline_schedule": "plan.schedule",
    "micro_batch": "batch.micro",
}
"""What other trainers call our keys, for the hint of an unknown key."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One place of the configuration."""

    kind: str
    """Type of JSON schema; "choice" is one of several objects, told apart by one of their keys."""
    expected: str = ""
    """Completes "expected ..."."""
    nullable: bool
    fields: Mapping[str, Node]
    """Of a section."""
    variants: Mapping[str, Node]
    """Of a choice: value of ``key`` -> section."""
    key: str
    """Of a choice: what tells its sections apart."""
    default_variant: str
    items: Node | None
    """Of a list."""
    words: tuple[str, ...]
    """Allowed texts, where only some are; of a choice, the values of ``key``."""

    @property
    def shorthands(self) -> tuple[str, ...]:
        """Optional sections of this one: their name alone, in its place, is them by default."""
        inside = self.fields.items()
        return tuple(name for name, node in inside if node.kind == "object" and node.nullable)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Every dotted key below this node, sections included."""
        for variant in self.variants.values():
            yield from variant.keys(prefix)
        for name, child in self.fields.items():
            yield prefix + name
            yield from child.keys(f"{prefix}{name}.")

    def child(self, name: str) -> Node | None:
        """What ``name`` is inside a section, or inside any section of a choice."""
        sections = (self, *self.variants.values())
        return next((node.fields[name] for node in sections if name in node.fields), None)

    def section_of(self, values: Mapping[str, Entry]) -> Node | None:
        """The section that values belong to: this one, or the one that they choose."""
        chosen = values.get(self.key)
        kind = self.default_variant if chosen is None else str(chosen.value)
        return self.variants.get(kind) if self.variants else self if self.fields else None

    def at(self, key: str) -> Node | None:
        """The node of a dotted key; None for an unknown one."""
        node: Node | None = self
        for name in key.split("."):
            node = node and node.child(name)
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
    leaf = _leaf(key)
    # So many letters must agree that of the part after the last dot at least 0.6 do.
    cutoff = 1 - 0.4 * len(leaf) / len(key)
    keys = list(dict.fromkeys(top.keys()))
    by_leaf = {_leaf(other): other for other in reversed(keys)}
    guesses = (
        _OTHER_NAMES.get(key, _OTHER_NAMES.get(leaf, "")) if top is root() else "",
        _kind_of(key, siblings),
        nearest(key, siblings, cutoff),
        nearest(key, [other for other in keys if _leaf(other) == leaf], cutoff=0),
        nearest(key, keys, cutoff),
        by_leaf.get(nearest(leaf, by_leaf, cutoff=0.7), ""),
    )
    return next(filter(None, guesses), "")


def _kind_of(key: str, siblings: Sequence[str]) -> str:
    """What chooses among the kinds of a section, for a key that other trainers call so."""
    section, dot, leaf = key.rpartition(".")
    kind = f"{section}.kind"
    return kind if dot and leaf in ("name", "type") and kind in siblings else ""


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _node(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Node:
    nullable = {"type": "null"} in schema.get("anyOf", ())
    if nullable:
        (schema,) = (option for option in schema["anyOf"] if option != {"type": "null"})
    default, choice = schema.get("default"), schema.get("discriminator", {})
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    key, sections = choice.get("propertyName", "kind"), choice.get("mapping", {})
    item = schema.get("items") or next(iter(schema.get("prefixItems", ())), None)
    node = Node(
        kind="choice" if choice else schema["type"],
        nullable=nullable,
        fields={name: _node(child, defs) for name, child in schema.get("properties", {}).items()},
        variants={name: _node({"$ref": ref}, defs) for name, ref in sections.items()},
        key=key,
        default_variant=default[key] if choice and default else "",
        items=_node(item, defs) if item else None,
        words=_words(schema, sections),
    )
    words = ", or null" * nullable + "".join(f", or {name!r}" for name in node.shorthands)
    return replace(node, expected=_expected(schema, node) + words)


def _words(schema: Mapping[str, Any], sections: Iterable[str]) -> tuple[str, ...]:
    only = [schema["const"]] if "const" in schema else []
    several = [word for option in schema.get("anyOf", ()) for word in option.get("enum", ())]
    return tuple(sections or schema.get("enum", only) or several)


def _expected(schema: Mapping[str, Any], node: Node) -> str:
    match node.kind:
        case "integer" | "number":
            return f"{'an' if node.kind == 'integer' else 'a'} {node.kind}{_bounds(schema)}"
        case "string":
            return one_of(node.words) if node.words else "text"
        case "boolean":
            return "true or false"
        case "object":
            return f"a section with keys of {', '.join(node.fields)}"
        case "choice":
            return f"a section whose {node.key} is {one_of(node.words)}"
    assert node.items is not None, f"a list of what: {schema}"
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    many = f"{low} " if low == high else "one or more " if low == 1 else ""
    return f"a list of {many}{_several(node.items)}"


def one_of(words: Iterable[str]) -> str:
    """``'a', 'b' or 'c'``."""
    quoted = [repr(word) for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


def _bounds(schema: Mapping[str, Any]) -> str:
    schema = {name: limit for name, limit in schema.items() if (name, limit) != ("maximum", MOST)}
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    limits += [f"in steps of {schema['multipleOf']}"] if "multipleOf" in schema else []
    return " " + " and ".join(limits) if limits else ""


def _several(items: Node) -> str:
    if items.words:
        return f"of {items.expected}"
    if items.kind in ("string", "boolean"):
        return f"{items.expected}s"
    _, noun, *rest = items.expected.split(" ")
    return " ".join([f"{noun}s", *rest])
