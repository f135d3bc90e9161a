"""A run's folder as it is found: whole, half written, or with a damaged file.

Nothing here raises because of what a file holds. What is not there is None or empty, and what
cannot be read is also said in words.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from weft.cluster.cluster import Cluster
from weft.plan.plan import Plan
from weft.report.events import EVENTS_FILE, Event, read_events
from weft.report.metrics import EvalMetrics, StepMetrics, read_metrics

if TYPE_CHECKING:
    from weft.checkpoint.listing import Listed

T = TypeVar("T")

UNREADABLE = (
    OSError,
    ValueError,  # JSON, text that is not UTF-8, ConfigError
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ArithmeticError,
    AssertionError,  # a plan whose numbers contradict each other
    yaml.YAMLError,
)
"""What reading, or showing, a file that is not what its name says may raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What the files of a run say."""

    folder: Path
    config: Mapping[str, object]
    """By dotted key; empty where it is not known."""
    origins: Mapping[str, str]
    """Dotted key -> where its value came from, in words."""
    plan: Plan | None
    cluster: Cluster | None
    steps: tuple[StepMetrics, ...]
    evals: tuple[EvalMetrics, ...]
    events: tuple[Event, ...]
    summary: Mapping[str, Any]
    """Written at the end of training; empty before."""
    profile: Mapping[str, Any]
    """What traces of a few steps said; empty where nobody asked for them."""
    checkpoints: tuple[Listed, ...]
    problems: tuple[str, ...]
    """Files that are there and could not be read, and why."""


def read_run(folder: Path) -> RunFiles:
    """Read every file of a run that is there."""
    problems: list[str] = []

    def read(name: str, parse: Callable[[Path], T]) -> T | None:
        path = folder / name
        if not path.exists():
            return None
        try:
            return parse(path)
        except UNREADABLE as error:
            problems.append(f"{name}: {reason(error, folder)}")
            return None

    steps, evals = read("metrics.jsonl", read_metrics) or ([], [])
    return RunFiles(
        folder=folder,
        config=dict(flat(read("config.yaml", _mapping) or {})),
        origins={key: str(place) for key, place in (read("origins.json", _mapping) or {}).items()},
        plan=read("plan.json", lambda path: Plan.from_json(path.read_text("utf-8"))),
        cluster=read("cluster.json", lambda path: Cluster.from_json(path.read_text("utf-8"))),
        steps=tuple(steps),
        evals=tuple(evals),
        events=tuple(read(EVENTS_FILE, read_events) or ()),
        summary=read("summary.json", _mapping) or {},
        profile=read("profile/summary.json", _mapping) or {},
        checkpoints=read("checkpoints", _checkpoints) or (),
        problems=tuple(problems),
    )


def reason(error: Exception, folder: Path) -> str:
    """Why a file of the run in ``folder`` cannot be used, in words."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"no YAML from line {error.problem_mark.line + 1} on"
    if isinstance(error, TypeError | AttributeError | IndexError):
        return "it has other contents than such a file of a run"
    return str(error).replace(f"{folder}{os.sep}", "") or f"a {type(error).__name__}"


def at(tree: object, *keys: str) -> Any:
    """What lies at the end of nested keys; None where a key is missing or no mapping has it."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def number(tree: Mapping[str, Any], *keys: str) -> float | None:
    """A finite number at the end of nested keys; None for anything else."""
    value = at(tree, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def flat(value: object, key: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, object]]:
    """(dotted key, value) of nested mappings; a list is one value, or ``in_lists`` what mappings in
    it hold, by their number."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name), in_lists=in_lists)
    elif in_lists and isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{key}[{number}]", in_lists=True)
    else:
        yield key, value


def _mapping(path: Path) -> dict[str, Any]:
    is_yaml, text = path.suffix == ".yaml", path.read_text("utf-8")
    value = yaml.safe_load(text) if is_yaml else json.loads(text)
    if not isinstance(value, dict):
        expected = "sections" if is_yaml else "an object"
        raise ValueError(f"expected {expected}, found {type(value).__name__}")
    return value


def _checkpoints(path: Path) -> tuple[Listed, ...]:
    from weft.checkpoint.entry import CheckpointError  # both import torch
    from weft.checkpoint.listing import list_checkpoints

    try:
        return tuple(list_checkpoints(path))
    except CheckpointError as error:
        raise ValueError(str(error)) from error
