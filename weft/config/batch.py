"""The batch arithmetic: samples = micro x accumulation x (sum of shares); two are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.config.errors import ConfigError
from weft.config.sections import BatchConfig
from weft.config.tree import DEFAULT, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All three numbers of the batch, and which of them was derived."""

    samples: int
    """Samples of one step of the whole job."""
    micro: int
    """Samples in one micro-batch of one pipeline."""
    accumulation: int
    """Micro-batches a step of a share of 1."""
    note: str
    """One sentence: the derived number and what it was derived from."""


def derive_batch(
    batch: BatchConfig, shares: Sequence[int], origins: Mapping[str, Origin] | None = None
) -> Batch:
    """The batch of a job with one pipeline, of one process or of several, for each share.

    Raises ConfigError unless exactly two of the three are given and the third comes out whole.
    ``origins`` (dotted key -> origin) lets the message say where each was given.
    """
    given = {name: value for name, value in batch if value is not None}
    if len(given) != 2:
        raise _not_two(given, origins or {})
    total = sum(shares)
    if not total:
        raise ConfigError(
            "plan.pipelines.share", list(shares), "a number above 0 for some pipeline"
        )
    times = f" x shares {total}" if total > 1 else ""
    if "samples" not in given:
        samples = given["micro"] * given["accumulation"] * total
        note = f"samples = {samples}, derived from "
        note += " x ".join(f"{name} {value}" for name, value in given.items()) + times
        return Batch(samples=samples, **given, note=f"batch.{note}")
    (name,) = given.keys() - {"samples"}
    derived = "micro" if name == "accumulation" else "accumulation"
    given[derived] = _divided(given["samples"], name, given[name], total)
    product = f"({name} {given[name]}{times})" if times else f"{name} {given[name]}"
    note = f"{derived} = {given[derived]}, derived from samples {given['samples']} / {product}"
    return Batch(**given, note=f"batch.{note}")


def _divided(samples: int, name: str, value: int, total: int) -> int:
    unit = value * total
    if samples % unit == 0:
        return samples // unit
    below = samples // unit * unit
    factors = f"batch.{name} ({value})"
    if total > 1:
        factors = f"batch.{name} x the sum of the shares ({value} x {total} = {unit})"
    hint = f"Try {below} or {below + unit}." if below else f"Try {unit}."
    raise ConfigError("batch.samples", samples, f"a multiple of {factors}", hint)


def _not_two(given: Mapping[str, int], origins: Mapping[str, Origin]) -> ConfigError:
    hint = {
        3: "Set one of them to null",
        1: "Give one more, and the third follows",
        0: "Give two, and the third follows",
    }[len(given)]
    places = ", ".join(f"{name} is given {origins.get(f'batch.{name}', DEFAULT)}" for name in given)
    hint = f"{hint}: {places}." if places and origins else f"{hint}."
    return ConfigError("batch", given, "two of samples, micro and accumulation", hint)
