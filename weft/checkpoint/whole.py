"""A whole model on one device, from any checkpoint, whatever plan saved it, or other weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.data.cache import TOKENIZER_FILE
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.models.decoder import Decoder
from weft.models.registry import FAMILIES, build_model, check_spec, spec_from_dict
from weft.nn.shapes import only_shapes
from weft.plan.box import Box
from weft.plan.model import ModelSpec


def saved_model(checkpoint: Checkpoint) -> ModelSpec:
    """The shape of the model that a checkpoint is of, and that its parameters fit.

    Raises:
        CheckpointError: it names no model, one that cannot be built, or holds other parameters.
    """
    saved = checkpoint.state.get("model")
    if not isinstance(saved, Mapping):
        raise CheckpointError("does not say which model it is of", file=checkpoint.folder)
    try:
        spec = spec_from_dict(saved)
        check_spec(spec)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"is of a model that cannot be built: {error}"
        raise CheckpointError(problem, file=checkpoint.folder) from error
    params = FAMILIES[spec.family].param_specs(spec)
    checkpoint.require({param.name: param.shape for param in params}, ("param",))
    return spec


class Saved(Protocol):
    """What has weights: a ``Checkpoint``, say, or a folder of Hugging Face's."""

    @property
    def folder(self) -> Place:
        """Where they are."""

    def read_into(self, out: Tensor, name: str, *, box: Box | None = None) -> None:
        """Copy elements of a parameter (None: all of them) into ``out``: ``[*box.size]``, of any
        dtype, on any device."""


def load_weights(spec: ModelSpec, saved: Saved, device: str | torch.device = "cpu") -> Decoder:
    """The unsplit model in fp32 with weights that are saved, for inference.

    Raises CheckpointError: a file is damaged.
    """
    with only_shapes():
        model = build_model(spec)
    model = model.to_empty(device=device)
    for name, param in model.named_parameters():
        saved.read_into(param, name)
    return model.eval().requires_grad_(requires_grad=False)


def load_model(checkpoint: Checkpoint, device: str | torch.device = "cpu") -> Decoder:
    """``load_weights`` of a checkpoint.

    Raises:
        CheckpointError: as ``saved_model``, or a file is damaged.
    """
    return load_weights(saved_model(checkpoint), checkpoint, device)


def load_tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a run keeps beside its checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    if checkpoint.run is None:
        problem = "has no tokenizer beside it: name the run's folder instead"
        raise CheckpointError(problem, file=checkpoint.folder)
    path = checkpoint.run / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"has no {TOKENIZER_FILE}", file=checkpoint.run)
    return load_tokenizer(path)
