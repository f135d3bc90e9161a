"""What a stage recomputes, as plans write it: ``full``, ``full:3``, ``activation+attention:2``.

A mode, in every layer or in the first few of the stage; several joined by ``+``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from weft.config.errors import ConfigError
from weft.config.names import nearest_name
from weft.recompute.registry import MODES

OFF = "off"
ELSEWHERE = ("host", "disk")
"""Tiers in which something may wait."""
Slabs = tuple[tuple[tuple[str, ...], float], ...]
"""Modes of some layers, and what part of the layers they are; those of which nothing is said keep
everything."""


@lru_cache(maxsize=1 << 10)
def asked(text: str) -> tuple[tuple[str, int | None], ...]:
    """The modes that a text names and their first layers; None: all. Nothing for "off".

    Raises:
        ValueError: it is no such text, and why.
    """
    if text == OFF:
        return ()
    found: dict[str, int | None] = {}
    for each in text.split("+"):
        name, count = _one(each)
        if name in found:
            raise ValueError(f"{name} is named twice")
        found[name] = count
    _refuse_idle_offload(found)
    return tuple(found.items())


def _refuse_idle_offload(found: Mapping[str, int | None]) -> None:
    """It must have layers of its own: those that keep something."""
    for name, most in found.items():
        for other in MODES[name].covers & found.keys():
            own = found[other]
            if MODES[other].offloads and (most is None or (own is not None and own <= most)):
                words = f"where {name} is, {other} has nothing to do"
                raise ValueError(f"{words}; {name}:3+{other} is for {other} after three layers")


def _one(text: str) -> tuple[str, int | None]:
    name, colon, count = text.partition(":")
    known = [mode for mode in MODES if mode != OFF]
    if name not in known:
        near = nearest_name(name, known)
        raise ValueError(f"no mode {name!r}" + (f"; did you mean {near}?" if near else ""))
    if not colon:
        return name, None
    if not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise ValueError(f"{count!r} is no number of layers")
    return name, int(count)


def in_words() -> str:
    """What may be asked for, for errors."""
    first, *rest = (mode for mode in MODES if mode != OFF)
    names = ", ".join([OFF, first, *rest])
    return f"one of {names}; full:3 is for the first three layers, core+full:3 for both"


def check_asked(key: str, text: object, num_layers: int | None = None) -> None:
    """
    Raises:
        ConfigError: it is no such text, or names more layers than the stage has.
    """
    if not isinstance(text, str):
        raise ConfigError(key, text, in_words())
    try:
        modes = asked(text)
    except ValueError as error:
        words = str(error)
        words = f"{words[:1].upper()}{words[1:]}{'' if words.endswith('?') else '.'}"
        raise ConfigError(key, text, in_words(), words) from None
    most = max((count for _, count in modes if count is not None), default=0)
    if num_layers is not None and most > num_layers:
        expected = f"{num_layers} layers at most, as the stage has"
        raise ConfigError(key, text, expected, "Without a number all of them recompute.")


def check_for_any(key: str, text: str) -> None:
    """Of stages whose layers a planner chooses.

    Raises:
        ConfigError: as ``check_asked``, or it names numbers of layers.
    """
    check_asked(key, text)
    if ":" in text:
        hint = "A plan's file or plan.stages say them of each stage."
        expected = "modes without numbers of layers, where the planner chooses stages"
        raise ConfigError(key, text, expected, hint)


def computed_again(text: str) -> str:
    """Of what is asked for, the part that computes again."""
    return "+".join(_texts(text, "device")) or OFF


def kept_off_host(text: str) -> str:
    """Of what is asked for, all but what waits in the memory of a host."""
    return "+".join(_texts(text, "device", "disk")) or OFF


def kept_off_disk(text: str) -> str:
    """Likewise, of files."""
    return "+".join(_texts(text, "device", "host")) or OFF


def offloads(text: str, number: int | None = None, *tiers: str) -> bool:
    """Something waits elsewhere, of any layer or of that with this number; in one of these tiers,
    where any are given."""
    names = [name for name, _ in asked(text)] if number is None else modes_of_layer(text, number)
    return any(MODES[name].waits in (tiers or ELSEWHERE) for name in names)


def in_short(text: str) -> list[str]:
    """What is asked for, in few words."""
    again = computed_again(text)
    found = [f"recompute {again}".removesuffix(" full")] * (again != OFF)
    for tier in ELSEWHERE:
        for each in _texts(text, tier):
            _, _, count = each.partition(":")
            found.append(f"activations on {tier}" + f" of {count} layers" * bool(count))
    return found


def _texts(text: str, *tiers: str) -> list[str]:
    """The modes whose layers keep what they do in these tiers, as they are asked for."""
    wanted = (each for each in asked(text) if MODES[each[0]].waits in tiers)
    return [name if count is None else f"{name}:{count}" for name, count in wanted]


def reduced(names: Sequence[str]) -> tuple[str, ...]:
    """Modes of one layer without those that others cover, in their order."""
    covered = {other for name in names for other in MODES[name].covers}
    return tuple(name for name in MODES if name in names and name not in covered)


def modes_of_layer(text: str, number: int) -> tuple[str, ...]:
    """Of the stage's layer with this number, from 0."""
    return reduced([name for name, count in asked(text) if count is None or number < count])


@lru_cache(maxsize=1 << 12)
def slabs_of(text: str, num_layers: int) -> Slabs:
    """Of a stage with so many layers."""
    modes = asked(text)
    if not num_layers:
        return ((modes_of_layer(text, 0), 1.0),) if modes else ()
    ends = {0, *(min(count or num_layers, num_layers) for _, count in modes)}
    return tuple(
        (modes_of_layer(text, first), (end - first) / num_layers)
        for first, end in pairwise(sorted(ends))
    )
