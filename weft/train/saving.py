"""Save a run and go on with one: this rank's pieces to and from a checkpoint.

Everything that a run is lies in the tensors and a few numbers: random values and the order of
samples are functions of the seed and of the step, so there is no generator state to keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.entry import JSON, CheckpointError, RankFile, Shard
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.rank_file import write_rank
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.store import begin, commit, prune, temporary
from weft.comm.comm import Comm
from weft.optim.adamw import MOMENTS, num_updates, set_state
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.train.build import Built, fill
from weft.train.loop import Run


def save(run: Run, root: Path, step: int, *, fingerprint: str) -> None:
    """Write the state after ``step`` steps; keep the newest few. Collective.

    ``fingerprint`` names the data, so that a run is not resumed on other samples.

    Raises:
        CheckpointError: a rank could not write, on every rank alike. Earlier checkpoints stay.
    """
    comm = run.comm
    updates = max(_together(comm, lambda: _begin(run, root, step)))
    written = _together(comm, lambda: _write(run, root, step))
    files = [rank_file_from_json(entry) for entry in written]
    state = _state(run, step, updates, fingerprint)
    _together(comm, lambda: _commit(run, root, step, files, state))


def _begin(run: Run, root: Path, step: int) -> int:
    """The updates that this rank has done: none where it keeps no parameter."""
    if run.is_main:
        begin(root, step)
    return num_updates(run.built.engine.optimizer)


def _write(run: Run, root: Path, step: int) -> JSON:
    return rank_file_json(write_rank(temporary(root, step), run.comm.rank, _shards(run.built)))


def _commit(
    run: Run, root: Path, step: int, files: Sequence[RankFile], state: Mapping[str, JSON]
) -> JSON:
    if run.is_main:
        commit(root, step, files, state)
        prune(root, run.config.checkpoint.keep)
    return None


def _together(comm: Comm, part: Callable[[], Any]) -> list[Any]:
    """Do one part of a save on every rank; if it fails on any, fail on all with its words."""
    try:
        answer: dict[str, Any] = {"value": part()}
    except CheckpointError as error:
        answer = {"problem": f"rank {comm.rank}: {error}"}
    answers = comm.gather_json(answer, name="checkpoint")
    problems = [entry["problem"] for entry in answers if "problem" in entry]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [entry["value"] for entry in answers]


def _shards(built: Built) -> list[Shard]:
    """What this rank owns: master values and the optimizer's moments."""
    shards = []
    for main in built.gradients.mains:
        if main.owned:
            state = built.engine.optimizer.state.get(main.value, {})
            moments = {kind: state[kind] for kind in MOMENTS if kind in state}
            for kind, tensor in {"param": main.value, **moments}.items():
                shards.append(Shard(main.spec.name, kind, main.spec.shape, main.box, tensor))
    return shards


def _state(run: Run, step: int, updates: int, fingerprint: str) -> dict[str, JSON]:
    return {
        "step": step,
        "samples": step * run.plan.global_batch,
        "updates": updates,
        "seed": run.config.seed,
        "data": fingerprint,
        "model": asdict(run.spec),
        "plan": json.loads(run.plan.to_json()),
        "config": run.config.model_dump(mode="json"),
    }


def restore(built: Built, checkpoint: Checkpoint) -> None:
    """Read this rank's boxes of every parameter and moment, whatever plan saved them.

    Raises:
        CheckpointError: something is missing, or is of another shape. Only a checkpoint without
            updates (an imported model, say) may lack the optimizer's moments: they start at zero.
    """
    shapes = {spec.name: spec.shape for spec in built.specs}
    updates = checkpoint.state.get("updates", 0)
    assert isinstance(updates, int), f"updates = {updates!r} in {checkpoint.folder}"
    may_lack = () if checkpoint.step and updates else MOMENTS
    missing = checkpoint.require(shapes, ("param", *MOMENTS), allow_missing=may_lack)

    def source(spec: ParamSpec, box: Box, dtype: torch.dtype) -> Tensor:
        return checkpoint.read(spec.name, "param", box, dtype)

    fill(built.gradients, source)
    if missing:
        return
    for main in built.gradients.mains:
        dtype, device = main.value.dtype, main.value.device
        moments = {
            kind: checkpoint.read(main.spec.name, kind, main.box, dtype).to(device)
            for kind in MOMENTS
        }
        set_state(built.engine.optimizer, main.value, moments, updates)
