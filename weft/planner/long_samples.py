"""What ways to compute long samples ask of the rest of a stage."""

from __future__ import annotations

from weft.axes.registry import AXES
from weft.config.errors import ConfigError
from weft.models.registry import shape_of
from weft.plan.model import ModelSpec
from weft.plan.plan import StagePlan
from weft.precision.registry import PRECISIONS
from weft.recompute.asked import asked
from weft.recompute.registry import MODES

BY_HEADS = next(name for name, axis in AXES.items() if axis.near_key == "head_ways")
"""The axis whose ranks divide heads in attention."""


def check_scores(key: str, stage: StagePlan) -> None:
    """Keys go from rank to rank where rows of scores are kept.

    Raises:
        ConfigError: they do not.
    """
    if stage.scores != "blocks" and stage.head_ways == stage.mesh.size(BY_HEADS):
        hint = f"Its ranks see all keys of their heads: there is nothing that {BY_HEADS} hands on."
        raise ConfigError(key, stage.scores, f'"blocks" where head_ways is {BY_HEADS}', hint)


def refuse_chunks_of_experts(key: str, recompute: str, spec: ModelSpec) -> None:
    """Experts compute the tokens that chose them, of whole samples.

    Raises:
        ConfigError: the model has some, and takes a few tokens at a time.
    """
    if shape_of(spec).experts is not None and modes_with_chunks(recompute):
        hint = "What experts make can be computed again: feed_forward keeps least of it."
        raise ConfigError(key, recompute, "other modes for a model with experts", hint)


def modes_with_chunks(recompute: str) -> list[str]:
    """Those of the modes that take a few tokens at a time."""
    return [name for name, _ in asked(recompute) if MODES[name].chunk_tokens]


def check_chunks(key: str, stage: StagePlan) -> None:
    """The feed-forward of some tokens is nothing else than that of all.

    Raises:
        ConfigError: it is something else.
    """
    chunks = modes_with_chunks(stage.recompute)
    summing = [name for name, axis in AXES.items() if axis.in_pieces and stage.mesh.size(name) > 1]
    hint, beside = "A sample has one scale, and a chunk is a part of a sample.", stage.precision
    if summing:
        hint = "Its ranks sum what they make of all tokens; pieces cut that along the sequence."
        beside = summing[0]
    if chunks and (summing or PRECISIONS[stage.precision].products is not None):
        expected = f"a mode other than {chunks[0]} beside {beside}"
        raise ConfigError(key, stage.recompute, expected, hint)
