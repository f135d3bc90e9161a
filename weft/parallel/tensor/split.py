"""Which part of a parameter each tensor-parallel rank holds: arithmetic on a model's sizes."""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.plan.box import Box
from weft.plan.layout import Placement, Shard
from weft.plan.model import ModelSpec
from weft.plan.tiling import split_evenly


def check_tp(spec: ModelSpec, tp: int, key: str) -> None:
    """Refuse a degree that would leave a rank without a head, or cut a head.

    Raises:
        ConfigError: with the degrees that work.
    """
    allowed = [n for n in range(1, spec.num_heads + 1) if spec.splits_over(n)]
    if tp not in allowed:
        words = f"one of {', '.join(map(str, allowed))}"
        heads = f"{spec.num_heads} heads share {spec.num_kv_heads} key heads"
        raise ConfigError(key, tp, words, f"The model's {heads}.")


def shard_box(
    spec: ModelSpec, shape: tuple[int, ...], placement: Placement, tp: int, tp_rank: int
) -> Box:
    """The box of a parameter of ``shape`` that one tensor-parallel rank holds."""
    whole = Box.whole(shape)
    if not isinstance(placement, Shard):
        return whole
    held = _elements(spec, shape[placement.dim], placement, tp, tp_rank)
    offset, size = list(whole.offset), list(whole.size)
    offset[placement.dim], size[placement.dim] = held.start, len(held)
    return Box(tuple(offset), tuple(size))


def _elements(spec: ModelSpec, size: int, placement: Shard, tp: int, tp_rank: int) -> range:
    if placement.by == "element":
        return part_of(size, tp, tp_rank)
    keys, per_key = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    if tp <= keys:
        held = part_of(keys, tp, tp_rank)
    else:
        several = tp // keys
        held = range(tp_rank // several, tp_rank // several + 1)
    if placement.by == "kv_head":
        unit = spec.d_head
    elif tp <= keys:
        unit = per_key * spec.d_head
    else:
        held, unit = range(tp_rank, tp_rank + 1), spec.num_heads // tp * spec.d_head
    return range(held.start * unit, held.stop * unit)


def part_of(size: int, parts: int, number: int) -> range:
    """The ``number``-th of ``parts`` consecutive, as even as possible parts of ``size``."""
    sizes = split_evenly(size, parts)
    start = sum(sizes[:number])
    return range(start, start + sizes[number])
