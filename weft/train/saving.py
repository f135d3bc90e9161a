"""Save a run and go on with one: this rank's pieces to and from a checkpoint.

Everything that a run is lies in the tensors and a few numbers: random values and the order of
samples are functions of the seed and of the step, so there is no generator state to keep.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.agent.client import SLOTS
from weft.checkpoint.draft import draft
from weft.checkpoint.entry import JSON, CheckpointError
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.remote.owner import Owner
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.shard import Shard, elements_of
from weft.checkpoint.store import is_free, prune
from weft.comm.comm import Comm
from weft.comm.heartbeat import with_heartbeat
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.train.assemble import Built, fill
from weft.train.loop import Run
from weft.train.saved_sites import (
    kinds_here,
    kinds_in,
    met_shards,
    own_state,
    restore_meeting,
    said_in,
    state_of_sites,
)

HISTORY = "fp8_largest"
"""The largest magnitudes of what a linear layer multiplied in the last steps."""


def save(
    run: Run,
    root: Place,
    step: int,
    *,
    fingerprint: str,
    finite: bool = True,
    owner: Owner | None = None,
) -> None:
    """Write the state after ``step`` steps; keep the newest few. Collective.

    Args:
        fingerprint: Names the data, so that a run is not resumed on other samples.
        finite: Loss and gradient norm of the step are numbers. It is recorded, if every value to be
            saved is one too.
        owner: Of this start, for storage far away; the main rank's counts.

    Raises:
        CheckpointError: a rank could not write, or holds values that are not finite while training
            is to end for those; on every rank alike. Earlier checkpoints stay.
    """
    try:
        _save(run, root, step, fingerprint=fingerprint, finite=finite, owner=owner)
    except CheckpointError:
        if run.is_main:
            draft(root, step, "", owner).abandon()
        raise


def _save(
    run: Run, root: Place, step: int, *, fingerprint: str, finite: bool, owner: Owner | None
) -> None:
    comm = run.comm
    shards = shards_of(run.built)
    state = state_of(run, step, shards, fingerprint=fingerprint, finite=finite)

    def begun() -> str:
        name = secrets.token_hex(8)
        if run.is_main:
            draft(root, step, name, owner).begin()
        return name

    mine = draft(root, step, together(comm, begun)[0], owner)

    def write() -> JSON:
        return rank_file_json(mine.write(comm.rank, *elements_of(shards)))

    is_far = isinstance(root, RemotePath)
    written = together(comm, write, may_be_slow=is_far)

    def committed() -> None:
        if run.is_main:
            mine.commit([rank_file_from_json(entry) for entry in written], state)
            _prune(root, step, run.config.checkpoint.keep)

    together(comm, committed, may_be_slow=is_far)


def other_writer(comm: Comm, held: Path, root: Place) -> str:
    """Wait for a process that outlived an earlier run and writes its last checkpoint. What is
    wrong if it does not end; else nothing. Collective."""
    limit_s = (SLOTS + 1) * comm.timeout_s  # each copy may wait so long for other machines

    def wait() -> bool:
        return comm.rank > 0 or is_free(held, limit_s)

    ended = with_heartbeat(comm, wait, name="checkpoints of an earlier run")
    if all(comm.gather_json(ended, name="checkpoints of an earlier run")):
        return ""
    still = f"after {limit_s:g} s a process of an earlier run still writes into"
    return f"{still} {root}. Its last checkpoint would be lost: wait, or end that process."


def _prune(root: Place, step: int, keep: int) -> None:
    """Older checkpoints that stay are no loss to the one that was saved."""
    try:
        prune(root, keep)
    except CheckpointError as error:
        sys.stderr.write(f"step {step}: older checkpoints: {error}\n")


def state_of(
    run: Run, step: int, shards: Sequence[Shard], *, fingerprint: str, finite: bool
) -> Mapping[str, JSON]:
    """What a checkpoint says besides tensors. Collective; arguments as of ``save``.

    Raises:
        CheckpointError: this cannot be saved; on every rank alike.
    """
    takes_all = not run.config.train.stop_after_non_finite

    def facts() -> tuple[bool, dict[str, JSON]]:
        """Whether this rank holds numbers; and what is of its site."""
        if run.built.executor.buffers.names:
            names = ", ".join(run.built.executor.buffers.names)
            raise CheckpointError(f"cannot hold buffers that change in training: {names}")
        is_finite = _is_finite(shards)
        if not (takes_all or is_finite):
            raise CheckpointError("parameters or the optimizer's state are not finite")
        return is_finite, own_state(run.built)

    all_finite, all_own = zip(*together(run.comm, facts), strict=True)
    state = _state(run, step, fingerprint) | state_of_sites(run.built.meeting, all_own)
    state["finite"] = finite and all(all_finite)
    return state


def together(comm: Comm, part: Callable[[], Any], *, may_be_slow: bool = False) -> list[Any]:
    """Do one part of a save on every rank; if it fails on any, fail on all with its words.

    ``may_be_slow``: ranks that wait are told that nobody is stuck.
    """

    def answered() -> dict[str, Any]:
        try:
            return {"value": part()}
        except CheckpointError as error:
            return {"problem": f"rank {comm.rank}: {error}"}

    answer = with_heartbeat(comm, answered, name="checkpoint") if may_be_slow else answered()
    answers = comm.gather_json(answer, name="checkpoint")
    problems = [entry["problem"] for entry in answers if "problem" in entry]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [entry["value"] for entry in answers]


def shards_of(built: Built) -> list[Shard]:
    """What this rank owns: master values and what the optimizer keeps."""
    shards = [] if built.meeting is None else met_shards(built.meeting)
    kinds = kinds_here(built)
    for main in built.gradients.mains:
        if main.owned:
            kind = kinds("param")
            shards.append(Shard(main.spec.name, kind, main.spec.shape, main.box, main.value))
        shapes = built.optimizer.kinds(main.spec)
        for kind, (box, tensor) in built.optimizer.owned(main).items():
            shards.append(Shard(main.spec.name, kinds(kind), shapes[kind], box, tensor))
    for frozen in built.gradients.frozen:
        if frozen.owned and (built.meeting is None or built.meeting.number == 0):
            value = frozen.value.to(built.gradients.precision.master.dtype)
            shards.append(Shard(frozen.spec.name, "param", frozen.spec.shape, frozen.box, value))
    for name, history in built.histories.kept():
        shape = tuple(history.shape)
        shards.append(Shard(name, kinds(HISTORY), shape, Box.whole(shape), history))
    return shards


@torch.no_grad()
def _is_finite(shards: Sequence[Shard]) -> bool:
    """Every element is a number."""
    tensors = (shard.tensor for shard in shards if shard.tensor.numel())
    found = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in tensors]
    by_device = {each.device: [one for one in found if one.device == each.device] for each in found}
    return all(bool(torch.stack(each).all()) for each in by_device.values())  # few reads wait


def _state(run: Run, step: int, fingerprint: str) -> dict[str, JSON]:
    return {
        "step": step,
        "samples": step * run.plan.global_batch,
        "seed": run.config.seed,
        "data": fingerprint,
        "model": asdict(run.spec),
        "plan": json.loads(run.plan.to_json()),
        "config": run.config.model_dump(mode="json"),
        "history": run.history.state(),
    }


def restore(built: Built, checkpoint: Checkpoint) -> None:
    """Read this rank's boxes of every parameter and optimizer state, whatever plan saved them.

    Raises:
        CheckpointError: something is missing, or is of another shape. Only a checkpoint without
            updates (an imported model, say) may lack the optimizer's state: it starts at zero.
    """
    said = said_in(checkpoint, built)
    updates = said.get("updates", 0)
    assert isinstance(updates, int), f"updates = {updates!r} in {checkpoint.folder}"
    kinds = kinds_in(checkpoint, built)
    shapes = {kinds(kind): of_kind for kind, of_kind in _shapes(built).items()}
    missing = []
    for kind, of_kind in shapes.items():
        may_lack = not kind.endswith("param") and not (checkpoint.step and updates)
        missing += checkpoint.require(of_kind, (kind,), allow_missing=(kind,) if may_lack else ())

    def param(out: Tensor, spec: ParamSpec, box: Box) -> None:
        kind = kinds("param") if spec.trainable else "param"
        checkpoint.read_into(out, spec.name, kind, box)

    def state(out: Tensor, spec: ParamSpec, kind: str, box: Box) -> None:
        checkpoint.read_into(out, spec.name, kinds(kind), box)

    fill(built.gradients, param)
    if built.meeting is not None:
        restore_meeting(built.meeting, checkpoint)
    scale = said.get("loss_scale")
    if built.engine.loss_scale is not None and isinstance(scale, dict):
        built.engine.loss_scale.restore(**_numbers(scale, checkpoint.folder))
    _restore_histories(built, checkpoint, kinds(HISTORY))
    if missing:
        built.optimizer.reset()
    else:
        built.optimizer.restore(updates, state)


def _restore_histories(built: Built, checkpoint: Checkpoint, kind: str) -> None:
    held = frozenset(checkpoint.names(kind))

    def history(out: Tensor, name: str) -> bool:
        fits = name in held and checkpoint.shape(name, kind) == tuple(out.shape)
        if fits:
            checkpoint.read_into(out, name, kind)
        return fits

    built.histories.restore(history)


def _numbers(scale: dict[str, JSON], folder: object) -> dict[str, float]:
    """What a loss scale goes on with, as a checkpoint says it.

    Raises:
        CheckpointError: it is something else.
    """
    value, clean = scale.get("value"), scale.get("clean_steps")
    if not (isinstance(value, float) and value >= 1 and isinstance(clean, float) and clean >= 0):
        raise CheckpointError(f"loss_scale is {scale!r} in {folder}")
    return {"value": value, "clean_steps": clean}


def _shapes(built: Built) -> dict[str, dict[str, tuple[int, ...]]]:
    """Kind -> name -> shape of everything that a checkpoint of this job holds."""
    trained = built.meeting is not None
    shapes = {"param": {s.name: s.shape for s in built.specs if s.trainable or not trained}}
    for spec in built.specs:
        for kind, shape in built.optimizer.kinds(spec).items():
            shapes.setdefault(kind, {})[spec.name] = shape
    return shapes
