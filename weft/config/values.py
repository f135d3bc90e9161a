"""What sections of a configuration are made of: their base, and kinds of values."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
)

# Strict: text and true/false are never numbers, and numbers never text.
Whole = Annotated[int, Field(strict=True, ge=0)]
Layers = Annotated[
    float,
    Field(strict=True, ge=0, multiple_of=0.5),
    AfterValidator(lambda number: int(number) if number.is_integer() else number),
    PlainSerializer(lambda number: number),  # else it writes whole ones as 2.0
]
"""Whole layers, and a half for part of one."""
Count = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
Part = Annotated[float, Field(strict=True, ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """What sections share: frozen, no unknown keys, no infinities, manuals from docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """With manuals, for which the source is read here: nobody else needs them."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for base in cls.__mro__:
            for name, text in manuals(base).items() if issubclass(base, Section) else ():
                properties.get(name, {}).setdefault("description", text)
        return found


def manuals(section: type[Section]) -> dict[str, str]:
    """The text under each of the fields that a class has of its own."""
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):  # no file has it: a function made it
        return {}
    (made,) = ast.parse(dedent(source)).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field, text in pairwise(made.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(manual))),
            ):
                found[name] = inspect.cleandoc(manual)
    return found
