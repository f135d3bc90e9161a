"""Which nodes of a cluster file a plan is to be for, where it is not just all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.cheapest import cheapest
from weft.planner.enough import enough
from weft.planner.goodput import USUAL_RESTART_S, most_trained
from weft.planner.least_energy import least_energy
from weft.planner.need import parse_need
from weft.planner.problem import Problem
from weft.planner.search import Found, Watch


class Chosen(Protocol):
    """Nodes that were chosen."""

    @property
    def cluster(self) -> ClusterView: ...

    def sentences(self) -> Iterator[str]:
        """For people."""

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""


class Choose(Protocol):
    """Nodes, and the best plan for them."""

    def __call__(self, problem: Problem, *, watch: Watch) -> tuple[Chosen, Found]: ...


@dataclass(frozen=True)
class NodesAsked:
    """What was asked for."""

    option: str
    value: Any
    choose: Choose


def nodes_asked(
    need: str | None,
    *,
    by_price: bool,
    by_energy: bool,
    within_s: float | None,
    by_goodput: bool,
    restart_s: float | None,
) -> NodesAsked | None:
    """From the options; None: all nodes.

    Raises:
        ConfigError: values that cannot be, also together.
    """
    _refuse_alone("--within", within_s, "--cheapest or --least-energy", by_price or by_energy)
    _refuse_alone("--restart", restart_s, "--goodput", by_goodput)
    asked = []
    if need is not None:
        asked.append(NodesAsked("--need", need, partial(enough, need=parse_need(need))))
    limit_s = inf if within_s is None else within_s
    if by_price:
        asked.append(NodesAsked("--cheapest", True, partial(cheapest, within_s=limit_s)))
    if by_energy:
        asked.append(NodesAsked("--least-energy", True, partial(least_energy, within_s=limit_s)))
    if by_goodput:
        after_s = USUAL_RESTART_S if restart_s is None else restart_s
        asked.append(NodesAsked("--goodput", True, partial(most_trained, restart_s=after_s)))
    if len(asked) > 1:
        first, second, *_ = asked
        expected = f"no {second.option} beside it"
        raise ConfigError(first.option, first.value, expected, "Each chooses nodes.")
    return asked[0] if asked else None


def _refuse_alone(option: str, seconds: float | None, other: str, is_there: bool) -> None:
    """Seconds that another option reads."""
    if seconds is not None and not is_there:
        raise ConfigError(option, seconds, f"{other} beside it", "It is for that choice.")
    if seconds is not None and not 0 < seconds < inf:
        raise ConfigError(option, seconds, "seconds, more than 0", "Such as 2.5.")
