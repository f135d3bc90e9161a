"""The JSON schema for editors, and the words that are derived from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from weft.config.load import RECIPES, config_schema, recipe_names
from weft.config.schema import _OTHER_NAMES, nearest_key, one_of, root
from weft.models.registry import FAMILIES


def _properties(schema: dict[str, Any], defs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every property of every section, depth first."""
    for child in schema["properties"].values():
        yield child
        options = [child, *child.get("anyOf", ()), child.get("items", {})]
        for ref in (option["$ref"] for option in options if "$ref" in option):
            yield from _properties(defs[ref.rpartition("/")[2]], defs)


def _allowed(value: object, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    """The keys of ``value`` are properties of the schema, all the way down."""
    options = [schema, *schema.get("anyOf", ())]
    options += [defs[o["$ref"].rpartition("/")[2]] for o in options if "$ref" in o]
    if not isinstance(value, dict):
        return True
    return any(
        "properties" in option
        and option.get("additionalProperties") is False
        and all(
            key in option["properties"] and _allowed(inner, option["properties"][key], defs)
            for key, inner in value.items()
        )
        for option in options
    )


def test_every_field_has_a_manual() -> None:
    schema = config_schema()
    fields = list(_properties(schema, schema["$defs"]))
    assert len(fields) > 50
    described = [f for f in fields if "$ref" in f or len(f.get("description", "")) > 10]
    assert described == fields
    assert all(section["description"] for section in schema["$defs"].values())


def test_manual_is_the_docstring() -> None:
    section = config_schema()["$defs"]["AdamWConfig"]["properties"]
    assert section["lr"]["description"] == "Highest learning rate."
    assert section["lr"]["exclusiveMinimum"] == 0


def test_modes_that_are_joined_fit_their_pattern() -> None:
    words, joined = config_schema()["$defs"]["ComputeConfig"]["properties"]["recompute"]["anyOf"]
    assert {"auto", "off", "full"} <= set(words["enum"])
    for text, fits in {
        "core+full:3": True,
        "off+core": False,
        "full:0": False,
        "ful": False,
    }.items():
        assert bool(re.search(joined["pattern"], text)) is fits, text


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_fit_the_schema(name: str) -> None:
    schema = config_schema()
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))
    assert _allowed(recipe, schema, schema["$defs"])
    recipe.setdefault("optim", {}).setdefault("schedule", {})["warm_up"] = 3
    assert not _allowed(recipe, schema, schema["$defs"])


def test_schema_lets_a_file_be_partial() -> None:
    schema = config_schema()
    assert "required" not in schema
    assert schema["properties"]["extends"]["type"] == "string"
    assert "anyOf" in schema["$defs"]["AdamWConfig"]["properties"]["schedule"]


def test_a_section_may_be_the_name_of_an_optional_one() -> None:
    assert root().fields["plan"].shorthands == ("auto",)
    options = config_schema()["properties"]["plan"]["anyOf"]
    assert ["auto"] in [option.get("enum") for option in options]
    assert config_schema()["properties"]["batch"].keys() >= {"$ref"}


def test_other_trainers_words_lead_to_real_keys() -> None:
    keys = set(root().keys())
    assert set(_OTHER_NAMES.values()) <= keys
    assert not keys & set(_OTHER_NAMES)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("modle", "model"),
        ("lr", "optim.lr"),
        ("steps", "train.steps"),
        ("optm.lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("plan.share", "plan.shares"),
        ("model.n_layers", "model.num_layers"),
        ("optim.beta", "optim.betas"),
        ("model.hidden_size", "model.d_model"),
        ("batch.size", "batch.samples"),
        ("optim.schedule.warmp", "optim.schedule.warmup"),
        ("xyzzy", ""),
    ],
)
def test_nearest_key(wrong: str, right: str) -> None:
    assert nearest_key(wrong) == right


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", "an integer from 0 to 4294967295"),
        ("model.family", one_of(FAMILIES)),
        ("model.dropout", "a number >= 0 and < 1, or null"),
        ("data.sources", "a list of sections with keys of path, weight, format, field"),
        ("plan.shares", "a list of one or more integers >= 1, or null"),
        ("optim.betas", "a list of 2 numbers >= 0 and < 1"),
        ("optim.schedule", "a section whose kind is 'cosine' or 'wsd'"),
        ("metrics.report", "true or false"),
        ("sample.top_p", "a number > 0 and <= 1"),
        ("sample.prompts", "a list of texts, or null"),
    ],
)
def test_words(key: str, expected: str) -> None:
    node = root().at(key)
    assert node is not None
    assert node.expected == expected
