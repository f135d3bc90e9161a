"""What sections of a configuration are made of: their base, and kinds of values."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

# Strict: text and true/false are never numbers, and numbers never text.
MOST = 2**63 - 1
"""As tensors and files count."""
MOST_SEED = 2**32 - 1
Whole = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Layers = Annotated[
    float,
    Field(strict=True, ge=0, multiple_of=0.5),
    AfterValidator(lambda number: int(number) if number.is_integer() else number),
    PlainSerializer(lambda number: number),  # else it writes whole ones as 2.0
]
"""Whole layers, and a half for part of one."""
Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Threads = Annotated[int, Field(strict=True, ge=1, le=1024)]
Depth = Annotated[int, Field(strict=True, ge=1, le=10_000)]
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
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
