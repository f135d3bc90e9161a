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
    times = f" x shares {total}" if total > 1 else ""
    match batch.samples, batch.micro, batch.accumulation:
        case None, int(micro), int(accumulation):
            samples = micro * accumulation * total
            note = f"samples = {samples}, derived from micro {micro} x accumulation {accumulation}"
            note += times
        case int(samples), None, int(accumulation):
            micro = _divided(samples, "accumulation", accumulation, total)
            note = f"micro = {micro}, derived from samples {samples}"
            note += f" / {_product(f'accumulation {accumulation}', times)}"
        case int(samples), int(micro), None:
            accumulation = _divided(samples, "micro", micro, total)
            note = f"accumulation = {accumulation}, derived from samples {samples}"
            note += f" / {_product(f'micro {micro}', times)}"
        case _:
            raise AssertionError(f"two of three are given: {batch}")
    return Batch(samples=samples, micro=micro, accumulation=accumulation, note=f"batch.{note}")


def _product(first: str, times: str) -> str:
    return f"({first}{times})" if times else first


def _divided(samples: int, name: str, value: int, total: int) -> int:
    unit = value * total
    if samples % unit == 0:
        return samples // unit
    below = samples // unit * unit
    factors = f"batch.{name}"
    if total > 1:
        factors += f" x the sum of the shares ({value} x {total} = {unit})"
    else:
        factors += f" ({value})"
    raise ConfigError(
        "batch.samples",
        samples,
        f"a multiple of {factors}",
        f"Try {below} or {below + unit}." if below else f"Try {unit}.",
    )


def _not_two(given: Mapping[str, int], origins: Mapping[str, Origin]) -> ConfigError:
    places = ", ".join(f"{name} is given {origins.get(f'batch.{name}', DEFAULT)}" for name in given)
    if len(given) == 3:
        hint = "Set one of them to null"
    elif given:
        hint = "Give one more, and the third follows"
    else:
        hint = "Give two, and the third follows"
    hint = f"{hint}: {places}." if places and origins else f"{hint}."
    return ConfigError("batch", given, "two of samples, micro and accumulation", hint)
