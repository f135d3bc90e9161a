"""Fields of a configuration whose values other packages give: names, and sections chosen by one.

To pydantic, to the JSON schema and to error messages such a field is what it would be with every
name written out here.
"""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from weft.config.names import names_of


class OneOf:
    """Marks a text: one of the words, or the name of something of a kind ("devices")."""

    def __init__(self, kind: str, *words: str) -> None:
        self._kind, self._words = kind, words

    def _all(self) -> list[str]:
        return [*self._words, *names_of(self._kind)]

    def _checked(self, value: str) -> str:
        if value not in self._all():
            raise ValueError(f"none of {self._all()}")
        return value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": self._all()}
