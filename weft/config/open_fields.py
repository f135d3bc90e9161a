"""Fields of a configuration whose values other packages give: names, and sections chosen by one.

To pydantic, to the JSON schema and to error messages such a field is what it would be with every
name written out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import SchemaValidator, core_schema

from weft.config.names import names_of, registry_of


class OneOf:
    """Marks a text: one of the words, or the name of something of a kind ("devices").

    Args:
        shows_first: The default is the first name, and the JSON schema says so.
        joins: Names but the first may be joined by ``+``, each with a number of layers after it
            (``core+full:3``); whether they go together is said by who uses them.
    """

    def __init__(
        self, kind: str, *words: str, shows_first: bool = False, joins: bool = False
    ) -> None:
        self._kind, self._words, self._shows_first = kind, words, shows_first
        self._joins = joins

    def _all(self) -> list[str]:
        return [*self._words, *names_of(self._kind)]

    def _checked(self, value: str) -> str:
        joined = self._joins and re.fullmatch(self._pattern(), value)
        if value not in self._all() and not joined:
            raise ValueError(f"none of {self._all()}")
        return value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        default = {"default": self._all()[0]} if self._shows_first else {}
        only: dict[str, Any] = {"enum": self._all()}
        if self._joins:
            only = {"anyOf": [only, {"pattern": f"^{self._pattern()}$"}]}
        return {**handler(schema), **only, **default}

    def _pattern(self) -> str:
        """Of several names."""
        _, *names = names_of(self._kind)
        one = f"({'|'.join(map(re.escape, names))})(:[1-9][0-9]*)?"
        return rf"{one}(\+{one})*"


def section_of(kind: str, key: str, data: Mapping[str, Any]) -> Any:
    """A section as the entry of a kind wants it that ``data`` names under ``key``.

    Raises pydantic.ValidationError: every problem of it.
    """
    registry = registry_of(kind)
    if isinstance(name := data.get(key), str) and name in registry:
        _ = registry[name]  # or why its package does not bring it
    sections = _sections(kind)
    first = next(iter(sections))
    if len(set(sections.values())) == 1:
        return sections[first].model_validate(data)
    choice = _choice(sections, lambda given: given.get(key, first))
    return SchemaValidator(choice).validate_python(data)


def _sections(kind: str) -> dict[str, type[BaseModel]]:
    """Those that entries bring; some are for programs alone and have none."""
    every = registry_of(kind).items()
    return {name: entry.config for name, entry in every if entry.config is not None}


def _choice(
    sections: Mapping[str, type[BaseModel]], chosen_by: str | Callable[[Any], Hashable]
) -> core_schema.CoreSchema:
    schemas = {name: section.__pydantic_core_schema__ for name, section in sections.items()}
    return core_schema.tagged_union_schema({**schemas}, discriminator=chosen_by)


class SectionOf:
    """Marks a section whose keys depend on one of them: "family" names a model family, and that
    says which others there are (its ``config``)."""

    def __init__(self, kind: str, *, key: str) -> None:
        self._kind, self._key = kind, key

    def _checked(self, value: object) -> Any:
        if isinstance(value, Mapping):
            return section_of(self._kind, self._key, value)
        if not isinstance(value, BaseModel):
            raise ValueError("no section")
        return value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        choice = handler(_choice(_sections(self._kind), self._key))
        default = section_of(self._kind, self._key, {}).model_dump(mode="json")
        one = choice["oneOf"][0] if len(choice["oneOf"]) == 1 else choice
        return {**one, "default": default}
