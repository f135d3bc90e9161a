"""What a model family says, all of it in its own folder. No torch until a model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from weft.config.sections import ModelConfig
from weft.models.config_json import Converter
from weft.models.shape import ModelShape
from weft.plan.layout import Border, Layout
from weft.plan.model import ModelSpec, ParamSpec

if TYPE_CHECKING:
    from weft.models.reference import Reference
    from weft.nn.stage import Buffer, Objective, Stage

Spec = TypeVar("Spec", bound=ModelSpec)


class Task(Protocol):
    """What a family is trained to do: from a model's description and the length of its samples to
    what the runtime asks for."""

    def objective(self, last: Stage, /) -> Objective:
        """What becomes of the last stage's output."""

    def border(self, spec: Any, seq_len: int, /) -> Border:
        """What crosses from any stage to the next."""

    def sizes(self, seq_len: int, /) -> Mapping[str, int]:
        """Of the logical dimensions that the job chooses, by name."""

    def weight_of_sample(self, seq_len: int, /) -> float:
        """About what one sample's weights add up to, a constant."""

    def buffers(self, spec: Any, /) -> Sequence[Buffer]:
        """Every buffer of the unsplit model."""


@runtime_checkable
class TaskInParts(Protocol):
    """That of a family whose head several stages may have a part of."""

    def between_parts(self, seq_len: int, /) -> Border:
        """What each part says to the others (``Begun.found``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family(Generic[Spec]):
    """One folder under ``weft.models``: its module ``family`` holds one of these as ``FAMILY``."""

    name: str
    order: int
    """Place where families are listed; the first is what a configuration names none of."""
    spec: type[Spec]
    sizes: Mapping[str, Spec]
    """Rows by name; vocabulary and length as published."""
    param_specs: Callable[[Spec], list[ParamSpec]]
    """Every parameter of the unsplit model, in the order of the forward pass."""
    layout: Callable[[Spec], dict[str, Layout]]
    """By module name, what the dimensions of its tensors are."""
    check: Callable[[Spec], None]
    """Raises ConfigError for a shape the family cannot have."""
    shape: Callable[[Spec], ModelShape]
    """What it computes, for the cost model."""
    config: type[ModelConfig]
    """What a configuration may say besides family and size: fields of ``spec`` by their names, and
    null for the row's value. The text under a field is its manual."""
    model: Callable[[], Callable[..., Stage]]
    """The class of a stage; called as ``model()(spec, layers, embed=..., head=...)``, and with
    ``cut`` (see ``build_stage``) where the family has ``parts``, ``first_row`` where it has a
    ``head_dim``."""
    task: Callable[[], Task]
    """What it is trained to do."""
    parts: tuple[str, str] | None = None
    """What the parts of a layer are called between which a stage may end: each adds to what goes
    from layer to layer. Parameters of the second say so (``ParamSpec.inside``). None: layers stay
    whole."""
    head_dim: str | None = None
    """The dimension of the head's parameters along which several stages may have a part each: these
    are ``InParts``, and the task says what goes ``between_parts``. None: the head stays whole."""
    converter: Converter[Spec] | None = None
    """To and from Hugging Face; None where nothing there is like it."""
    reference: Callable[[], Reference] | None = None
    """The model written out a second time, for ``weft verify``; None: nothing to compare with."""
