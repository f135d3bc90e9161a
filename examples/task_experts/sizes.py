"""Sizes of the model, and the parameters that follow from its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from task_experts.images import CLASSES, PATCH, SIZE, TASKS
from weft.config.errors import ConfigError
from weft.models.shape import ExpertShape, ModelShape
from weft.plan.layout import Layout
from weft.plan.model import ExpertsSpec, Init, ModelSpec, ParamSpec, UnitName


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec(ModelSpec):
    """A vision transformer (arXiv 2010.11929) of patches, with experts in every layer."""

    d_ff: int
    num_heads: int
    num_classes: int
    experts: ExpertsSpec

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    def reduced(self) -> Self:
        return replace(self, num_layers=min(self.num_layers, 4))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "experts": ExpertsSpec(**data["experts"])})


SMALL = VisionSpec(
    family="task-experts",
    d_model=32,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    num_classes=sum(CLASSES),
    vocab_size=PATCH * PATCH,
    seq_len=(SIZE // PATCH) ** 2,
    experts=ExpertsSpec(count=6, top_k=2, tasks=len(TASKS), normed=False, shared_d_ff=16, z=1e-3),
)
SIZES = {"small": SMALL}


def check(spec: VisionSpec) -> None:
    """Refuse, as ConfigError, what no such model can be."""
    if spec.experts.top_k > spec.experts.count:
        expected = f"at most experts.count ({spec.experts.count})"
        raise ConfigError("experts.top_k", spec.experts.top_k, expected)
    if spec.experts.tasks < 1:
        hint = "Experts are chosen by tasks here."
        raise ConfigError("experts.tasks", spec.experts.tasks, "an integer >= 1", hint)


def params_of(layout: Mapping[str, Layout]) -> list[ParamSpec]:
    """Every parameter that the layout names, in its order."""
    params, unit = list[ParamSpec](), "embed"
    for module, entry in layout.items():
        names = module.split(".")
        unit = names[1] if names[0] == "layers" else "head" if unit != "embed" else unit
        for own, dims in entry.params.items():
            params.append(
                ParamSpec(
                    name=f"{module}.{own}",
                    shape=tuple(dim.size for dim in dims),
                    unit=_unit(unit),
                    init=_start(module, own, dims[-1].size),
                    decay=len(dims) >= 2 and unit != "embed",
                )
            )
    return params


def _unit(name: str) -> UnitName:
    return int(name) if name.isdigit() else "head" if name == "head" else "embed"


def _start(module: str, own: str, width: int) -> Init:
    """Scores of tasks begin far enough from each other that tasks choose experts of their own."""
    if own == "bias":
        return Init("zeros")
    if "norm" in module:
        return Init("ones")
    return Init("normal", 1.0 if module.endswith("router") else width**-0.5)


def shape(spec: VisionSpec) -> ModelShape:
    """What it computes, for the cost model."""
    return ModelShape(
        num_layers=spec.num_layers,
        d_model=spec.d_model,
        d_ff=spec.d_ff,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        d_head=spec.d_head,
        vocab_size=spec.vocab_size,
        gated=True,
        causal=False,
        experts=ExpertShape(
            num_experts=spec.experts.count,
            top_k=spec.experts.top_k,
            d_ff=spec.d_ff,
            shared_d_ff=spec.experts.shared_d_ff,
        ),
    )
