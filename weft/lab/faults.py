"""Faults by appointment: what goes wrong, when, and for how long; and that it does."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError
from weft.lab.lab import Lab

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

    def meets(self, other: Fault) -> bool:
        """Both do the same to one thing."""
        each = ((o.verb, o.host, o.rank, frozenset(o.link or ())) for o in (self, other))
        return next(each) == next(each)


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

    def number(pattern: str, low: float, high: float, expected: str) -> float:
        if not re.fullmatch(pattern, value) or not low <= float(value) <= high:
            raise _wrong(text, f"{expected}, not {value!r}")
        return float(value)

    match key:
        case "step":
            return "step", int(number(r"\d{1,12}", 1, inf, "a step from 1 on"))
        case "at" | "for":
            if (match := _DURATION.fullmatch(value)) is None:
                raise _wrong(text, f"a time such as 10s, 500ms or 2min, not {value!r}")
            return f"{key}_s", float(match[1]) * _UNITS[match[2]]
        case "host":
            return "host", _host(text, value, cluster)
        case "rank":
            last = cluster.world_size - 1
            return "rank", int(number(r"\d{1,9}", 0, last, f"a rank from 0 to {last}"))
        case "link":
            first, dash, second = value.partition("-")
            if not dash or first == second:
                raise _wrong(text, f"two hosts, as in link=h1-h2, not {value!r}")
            return "link", (_host(text, first, cluster), _host(text, second, cluster))
        case "to":
            return "speed", number(r"\d?\.?\d{1,6}", 0.01, 1, "a speed from 0.01 to 1")
    raise AssertionError(f"no field for {key}")


def _host(text: str, name: str, cluster: ClusterFile) -> int:
    names = [host.name for host in cluster.hosts]
    if name not in names:
        raise _wrong(text, f"a host of the cluster ({', '.join(names)}), not {name!r}")
    return names.index(name)


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


Say = Callable[[str], None]


@dataclass
class Appointment:
    """One fault and what has become of it."""

    fault: Fault
    happened_s: float | None = None
    """Time from the start of the ranks; None: not yet."""
    after_step: int | None = None
    """The last step that the metrics of the run held then."""
    undone_s: float | None = None

    @property
    def is_there(self) -> bool:
        return self.happened_s is not None and self.undone_s is None

    def keep(
        self,
        now_s: float,
        step: int,
        lab: Lab,
        say: Say,
        *,
        beside: Sequence[Appointment] = (),
    ) -> None:
        """Do the fault, or undo it, when it is time; of what others of ``beside`` do to the same
        thing, the last that came then holds."""
        fault = self.fault
        if self.happened_s is None:
            at_s = inf if fault.at_s is None else fault.at_s
            if now_s >= at_s if fault.step is None else step >= fault.step:
                _carry_out(fault, lab)
                self.happened_s, self.after_step = now_s, step
                say(f"{now_s:.1f} s, after step {step}: fault: {fault.text}")
            return
        lasts_s = inf if fault.for_s is None else fault.for_s
        if self.undone_s is None and now_s >= self.happened_s + lasts_s:
            self.undone_s = now_s
            self._undo(lab, [o for o in beside if o.is_there and o.fault.meets(fault)])
            say(f"{now_s:.1f} s, after step {step}: over: {fault.text}")

    def _undo(self, lab: Lab, others: Sequence[Appointment]) -> None:
        """``others``: what is still there of the same."""
        if not others:
            _carry_out(self.fault, lab, undo=True)
        elif self.fault.verb == "slow":
            _carry_out(max(others, key=lambda each: each.happened_s or 0.0).fault, lab)


def _carry_out(fault: Fault, lab: Lab, *, undo: bool = False) -> None:
    match fault:
        case Fault(verb="kill", host=int(host)):
            lab.kill_host(host, fault.text)
        case Fault(verb="kill", rank=int(rank)):
            lab.kill_rank(rank, fault.text, by_fault=True)
        case Fault(verb="stop", rank=int(rank)) if undo:
            lab.groups.signal(rank, signal.SIGCONT)
        case Fault(verb="stop", rank=int(rank)):
            lab.stop_rank(rank, for_good=fault.text if fault.for_s is None else "")
        case Fault(verb="cut", link=(one, other)):
            lab.network.cut(one, other, mend=undo)
        case Fault(verb="slow", rank=int(rank), speed=float(speed)):
            lab.groups.set_speed(rank, lab.cluster.by_rank[rank][1].speed if undo else speed)
        case Fault(verb="disk"):
            assert lab.disk is not None, "a lab without a disk of its own"
            (lab.disk.empty if undo else lab.disk.fill)()
        case _:
            raise AssertionError(f"not a whole fault: {fault}")
