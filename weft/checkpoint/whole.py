"""A whole model on one device, from any checkpoint, whatever plan saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import Checkpoint
from weft.data.cache import TOKENIZER_FILE
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.models.decoder import Decoder
from weft.models.registry import build_model, spec_from_dict


def load_model(checkpoint: Checkpoint, device: str | torch.device = "cpu") -> Decoder:
    """The unsplit model in fp32 with the checkpoint's weights, for inference.

    Raises:
        CheckpointError: the checkpoint does not say which model it is of, or does not fit it.
    """
    saved = checkpoint.state.get("model")
    if not isinstance(saved, Mapping):
        raise CheckpointError("does not say which model it is of", file=checkpoint.folder)
    try:
        spec = spec_from_dict(saved)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"names no model: {error}", file=checkpoint.folder) from error
    with torch.device("meta"):
        model = build_model(spec)
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
    path: Path = checkpoint.folder.parent.parent / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError("has no tokenizer beside it", file=path)
    return load_tokenizer(path)
