"""A whole model on one device, from any checkpoint, whatever plan saved it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import Checkpoint
from weft.data.cache import TOKENIZER_FILE
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.models.decoder import Decoder
from weft.models.registry import FAMILIES, build_model, check_spec, spec_from_dict
from weft.nn.shapes import only_shapes
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


def load_model(checkpoint: Checkpoint, device: str | torch.device = "cpu") -> Decoder:
    """The unsplit model in fp32 with the checkpoint's weights, for inference.

    Raises:
        CheckpointError: as ``saved_model``, or a file is damaged.
    """
    with only_shapes():
        model = build_model(saved_model(checkpoint))
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(checkpoint.read(name, "param", dtype=torch.float32))
    return model.eval().requires_grad_(requires_grad=False)


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
        raise CheckpointError("has no tokenizer beside it", file=path)
    return load_tokenizer(path)
