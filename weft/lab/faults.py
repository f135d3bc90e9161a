"""Faults by appointment: what goes wrong, when, and for how long."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError

Verb = Literal["kill", "stop", "cut", "slow", "disk"]

EXAMPLES = (
    "step=20 kill host=h2",
    "step=20 kill rank=1",
    "step=20 stop rank=1 for=10s",
    "at=12s cut link=h1-h2 for=5s",
    "step=20 slow rank=1 to=0.3",
    "step=20 disk full for=5s",
)
_SHAPES: Mapping[str, str] = {
    "kill": "kill host=NAME or kill rank=N",
    "stop": "stop rank=N [for=10s]",
    "cut": "cut link=NAME-NAME [for=5s]",
    "slow": "slow rank=N to=0.3 [for=10s]",
    "disk": "disk full [for=5s]",
}
_NEEDS: Mapping[str, tuple[set[str], ...]] = {
    "kill": ({"host"}, {"rank"}),
    "stop": ({"rank"},),
    "cut": ({"link"},),
    "slow": ({"rank", "to"},),
    "disk": (set(),),
}
"""Keys that belong to a verb, beside the time and ``for``: one of these."""
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|min)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. What its verb does not need is None or empty."""

    text: str
    """As it was written."""
    verb: Verb
    step: int | None = None
    """It comes when this step has been written to the metrics of the run ..."""
    at_s: float | None = None
    """... or so long after the ranks were started."""
    for_s: float | None = None
    """After so long it is undone; None: it stays."""
    host: int | None = None
    """Number of the host that dies with all its ranks."""
    rank: int | None = None
    link: tuple[int, int] | None = None
    """Numbers of two hosts."""
    speed: float | None = None


def parse_fault(text: str, cluster: ClusterFile) -> Fault:
    """``step=20 kill host=h2`` and the like, for this cluster.

    Raises:
        ConfigError: it cannot be understood, or names what the cluster lacks.
    """
    words = text.split()
    verb, given = _taken_apart(text, words)
    if len(given.keys() & {"step", "at"}) != 1:
        raise _wrong(text, "one of step=20 and at=12s, for when it comes")
    lasting = {"for"} if verb != "kill" else set()
    rest = given.keys() - {"step", "at"} - lasting
    allowed = set().union(*_NEEDS[verb])
    if odd := sorted(rest - allowed):
        raise _wrong(text, f"{_SHAPES[verb]}; {odd[0]!r} does not belong to it")
    if rest not in _NEEDS[verb]:
        raise _wrong(text, _SHAPES[verb])
    fields = dict(_field(text, key, value, cluster) for key, value in given.items())
    return Fault(text=" ".join(words), verb=verb, **fields)


def _field(text: str, key: str, value: str, cluster: ClusterFile) -> tuple[str, Any]:
    """The field of a fault that a key gives, and its value."""
    match key:
        case "step":
            return "step", _step(text, value)
        case "at" | "for":
            return f"{key}_s", _seconds(text, value)
        case "host":
            return "host", _host(text, value, cluster)
        case "rank":
            return "rank", _rank(text, value, cluster)
        case "link":
            return "link", _link(text, value, cluster)
        case "to":
            return "speed", _speed(text, value)
    raise AssertionError(f"no field for {key}")


def _taken_apart(text: str, words: list[str]) -> tuple[Verb, dict[str, str]]:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    bare = [word for word in words if "=" not in word]
    if len(given) + len(bare) < len(words):
        raise _wrong(text, "every key once")
    for verb in get_args(Verb):
        if bare == (["disk", "full"] if verb == "disk" else [verb]):
            return verb, given
    near = difflib.get_close_matches(bare[0] if bare else "", _SHAPES, n=1)
    raise _wrong(text, _SHAPES[near[0]] if near else "one of " + ", ".join(_SHAPES.values()))


def _wrong(text: str, expected: str) -> ConfigError:
    return ConfigError("--fault", text, expected, f"For example: {EXAMPLES[0]!r}.")


def _step(text: str, value: str) -> int:
    if not re.fullmatch(r"\d{1,12}", value) or int(value) < 1:
        raise _wrong(text, f"a step from 1 on, not {value!r}")
    return int(value)


def _seconds(text: str, value: str) -> float:
    match = _DURATION.fullmatch(value)
    if match is None:
        raise _wrong(text, f"a time such as 10s, 500ms or 2min, not {value!r}")
    return float(match[1]) * _UNITS[match[2]]


def _host(text: str, name: str, cluster: ClusterFile) -> int:
    names = [host.name for host in cluster.hosts]
    if name not in names:
        raise _wrong(text, f"a host of the cluster ({', '.join(names)}), not {name!r}")
    return names.index(name)


def _rank(text: str, value: str, cluster: ClusterFile) -> int:
    if not re.fullmatch(r"\d{1,9}", value) or int(value) >= cluster.world_size:
        raise _wrong(text, f"a rank from 0 to {cluster.world_size - 1}, not {value!r}")
    return int(value)


def _link(text: str, value: str, cluster: ClusterFile) -> tuple[int, int]:
    first, dash, second = value.partition("-")
    if not dash or first == second:
        raise _wrong(text, f"two hosts, as in link=h1-h2, not {value!r}")
    return _host(text, first, cluster), _host(text, second, cluster)


def _speed(text: str, value: str) -> float:
    if not re.fullmatch(r"\d?\.?\d{1,6}", value) or not 0.01 <= float(value) <= 1:
        raise _wrong(text, f"a speed from 0.01 to 1, not {value!r}")
    return float(value)
