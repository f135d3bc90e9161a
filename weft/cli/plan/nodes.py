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
from weft.planner.need import parse_need
from weft.planner.problem import Problem
from weft.planner.search import Found, Progress


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

    def __call__(self, problem: Problem, *, progress: Progress | None) -> tuple[Chosen, Found]: ...


@dataclass(frozen=True)
class NodesAsked:
    """What was asked for."""

    option: str
    value: Any
    choose: Choose


def nodes_asked(need: str | None, within_s: float | None, *, by_price: bool) -> NodesAsked | None:
    """From the options; None: all nodes.

    Raises:
        ConfigError: values that cannot be, also together.
    """
    if within_s is not None and not by_price:
        raise ConfigError("--within", within_s, "--cheapest beside it", "It limits that choice.")
    if within_s is not None and within_s <= 0:
        raise ConfigError("--within", within_s, "seconds of a step, more than 0", "Such as 2.5.")
    if need is not None and by_price:
        raise ConfigError("--need", need, "no --cheapest beside it", "Both choose nodes.")
    if need is not None:
        return NodesAsked("--need", need, partial(enough, need=parse_need(need)))
    if by_price:
        limit_s = inf if within_s is None else within_s
        return NodesAsked("--cheapest", True, partial(cheapest, within_s=limit_s))
    return None
