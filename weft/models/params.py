"""How parameters of each kind start and whether they decay, for every family. No torch."""

from __future__ import annotations

import math
from typing import Literal

from weft.models.decoder_spec import DecoderSpec
from weft.plan.model import Init, ModelSpec, ParamSpec, UnitName


def initial_std(spec: ModelSpec) -> float:
    """Standard deviation of a matrix at the start (arXiv 1910.05895); 0.02 at d_model 1000."""
    return math.sqrt(2 / (5 * spec.d_model))


def embedding_std(spec: DecoderSpec) -> float:
    """Of the vocabulary's table. A tied one starts like the head it is; one of its own at unit
    size, so that the first blocks add to something: a small model learns faster then."""
    return initial_std(spec) if spec.tied else 1.0


def branch_std(spec: ModelSpec) -> float:
    """Of a matrix that ends a residual branch: the sum of all branches keeps its size."""
    return initial_std(spec) / math.sqrt(2 * spec.num_layers)


def matrix(name: str, shape: tuple[int, int], unit: UnitName, std: float) -> ParamSpec:
    """The weight ``[out, in]`` of a linear map."""
    return ParamSpec(name=name, shape=shape, unit=unit, init=Init("normal", std), decay=True)


def vector(name: str, size: int, unit: UnitName, start: Literal["ones", "zeros"]) -> ParamSpec:
    """A norm's weight or a bias."""
    return ParamSpec(name=name, shape=(size,), unit=unit, init=Init(start), decay=False)


def table(name: str, rows: int, spec: ModelSpec, *, std: float, tied: bool = False) -> ParamSpec:
    """A table of vectors to look up; ``tied``: the head multiplies by it too."""
    return ParamSpec(
        name=name,
        shape=(rows, spec.d_model),
        unit="embed",
        init=Init("normal", std),
        decay=False,
        also=("head",) if tied else (),
    )


def head(spec: DecoderSpec) -> list[ParamSpec]:
    """The head's own weight, where it is not the embedding's."""
    shape = (spec.vocab_size, spec.d_model)
    return [] if spec.tied else [matrix("head.weight", shape, "head", initial_std(spec))]
