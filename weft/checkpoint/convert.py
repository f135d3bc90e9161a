"""Checkpoints from and to Hugging Face folders. How a family is written there is its own."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from weft.checkpoint.draft import draft
from weft.checkpoint.entry import JSON, CheckpointError, wholly
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.shard import Shard, elements_of
from weft.checkpoint.store import candidates
from weft.checkpoint.whole import saved_model
from weft.models import hugging_face
from weft.plan.box import Box


def export_hf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    tokenizer_file: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the parameters as a folder that ``transformers`` opens, in ``dtype`` or as stored.

    Reads them as they are written, so that memory holds one of the folder's files at a time. Where
    it cannot be written whole nothing is left of it, but for what was in a folder before.

    Raises:
        CheckpointError: the checkpoint is not of a model, is damaged, or ``out`` cannot be written.
        ConfigError: no Hugging Face architecture has the model's shape.
    """
    spec = saved_model(checkpoint)
    try:
        with wholly(out):
            hugging_face.export_hf(out, spec, partial(checkpoint.read, dtype=dtype), tokenizer_file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be written: {error}", file=out) from error


def import_hf(folder: Path, root: Place) -> Place:
    """Make a checkpoint of step 0 from a Hugging Face folder; the checkpoint's folder.

    It holds parameters in their files' dtype, and no optimizer's moments.

    Raises:
        CheckpointError: ``root`` holds checkpoints already, or cannot be written.
        ConfigError: the folder is not one that Weft can read.
    """
    if root.is_dir() and candidates(root):
        raise CheckpointError("holds checkpoints already", file=root)
    spec, tensors = hugging_face.import_hf(folder)
    shards = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        shards.append(Shard(name, "param", shape, Box.whole(shape), tensor))
    one = draft(root, 0, secrets.token_hex(8))
    one.begin()
    written = one.write(0, *elements_of(shards))
    state: dict[str, JSON] = {"step": 0, "samples": 0, "model": asdict(spec)}
    return one.commit([written], state)
