"""What ``weft checkpoint ls`` and ``show`` tell: facts of checkpoints, without their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from weft.checkpoint.entry import JSON, CheckpointError
from weft.checkpoint.index import Index
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint, checkpoints_root
from weft.checkpoint.store import candidates, folder_step, read_index, read_latest, step_name
from weft.plan.box import Box
from weft.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One line of the list of checkpoints."""

    folder: Place
    step: int
    latest: bool
    """``latest`` names it."""
    problem: str
    """Why it cannot be opened; empty for a complete one. The facts below are 0 or None then."""
    saved_at: float = 0.0
    """Seconds since 1970."""
    bytes: int = 0
    """Size of its rank files."""
    num_tensors: int = 0
    num_params: int = 0
    """Elements of the tensors of kind ``param``."""
    finite: bool = True
    """What it holds are numbers, as far as was recorded."""
    world_size: int | None = None
    """Ranks of the plan that wrote it; None where no plan is recorded."""

    @property
    def complete(self) -> bool:
        return not self.problem


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """All tensors of one kind."""

    kind: str
    num_tensors: int
    num_elements: int
    bytes: int
    dtypes: tuple[str, ...]
    """Safetensors codes, e.g. ``F32``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """One checkpoint at length."""

    listed: Listed
    weft: str
    """Version that wrote it."""
    kinds: tuple[KindFacts, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Logical parameter names and their global shapes."""
    state: Mapping[str, JSON]


def list_checkpoints(root: Place) -> list[Listed]:
    """Every checkpoint of a folder of checkpoints or of a run, by step, damaged ones included.

    Raises CheckpointError if there is no such folder.
    """
    root = checkpoints_root(root)
    latest = read_latest(root)
    found = []
    for folder in candidates(root):
        try:
            found.append(_facts(read_index(folder), folder, latest))
        except CheckpointError as error:
            step = folder_step(folder)
            is_latest = step_name(step) == latest
            found.append(Listed(folder=folder, step=step, latest=is_latest, problem=str(error)))
    return found


def describe(checkpoint: Checkpoint) -> Description:
    """What an open checkpoint holds."""
    index, folder = checkpoint.index, checkpoint.folder
    return Description(
        listed=_facts(index, folder, read_latest(folder.parent)),
        weft=index.weft,
        kinds=tuple(_kind_facts(index, kind) for kind in checkpoint.kinds),
        shapes={name: checkpoint.shape(name) for name in checkpoint.names()},
        state=checkpoint.state,
    )


def _facts(index: Index, folder: Place, latest: str | None) -> Listed:
    return Listed(
        folder=folder,
        step=index.step,
        latest=step_name(index.step) == latest,
        problem="",
        saved_at=index.saved_at,
        bytes=sum(facts.bytes for facts in index.files.values()),
        num_tensors=len(index.tensors),
        num_params=_kind_facts(index, "param").num_elements,
        finite=index.is_finite,
        world_size=_world_size(index.state.get("plan")),
    )


def _kind_facts(index: Index, kind: str) -> KindFacts:
    tensors = [tensor for tensor in index.tensors.values() if tensor.kind == kind]
    whole = [(tensor, Box.whole(tensor.shape)) for tensor in tensors]
    return KindFacts(
        kind=kind,
        num_tensors=len(tensors),
        num_elements=sum(box.numel for _, box in whole),
        bytes=sum(tensor.num_bytes(box) for tensor, box in whole),
        dtypes=tuple(sorted({tensor.dtype for tensor in tensors})),
    )


def _world_size(plan: JSON) -> int | None:
    """Of a plan as its own JSON; None for anything that is not one."""
    try:
        return Plan.from_json(json.dumps(plan)).world_size
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, AssertionError):
        return None
