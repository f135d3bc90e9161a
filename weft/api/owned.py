"""What belongs to one model, and to no copy of it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Owned(Generic[T]):
    """Lives as long as the model that holds it. A copy of that, or what is loaded of it, has none:
    what it would have is the model's."""

    def __init__(self, value: T | None) -> None:
        self.value = value

    def __deepcopy__(self, _memo: dict[int, Any]) -> Owned[T]:
        return Owned(None)

    def __reduce__(self) -> tuple[type[Owned[T]], tuple[None]]:
        return Owned, (None,)
