"""Apply a family's layout to one stage's modules: the one applier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.decoder import Decoder
from weft.nn.dropout import Dropout
from weft.parallel.tensor.modules import RowLinear, VocabCrossEntropy, VocabEmbedding
from weft.parallel.tensor.sequence import TensorGroup
from weft.plan.box import Box
from weft.plan.layout import Layout, Replicate, Shard


def shrink_params(model: Decoder, boxes: Mapping[str, Box]) -> None:
    """Let a module built on the meta device hold only this rank's box of each parameter."""
    for name, param in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        local = torch.empty(boxes[name].size, dtype=param.dtype, device=param.device)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(local))


def apply_layout(
    model: Decoder, layout: Mapping[str, Layout], boxes: Mapping[str, Box], group: TensorGroup
) -> None:
    """Gather and scatter activations where the layout says so. Parameters keep their identity."""
    modules = dict(model.named_modules())
    for name, entry in layout.items():
        module = modules.get(name)
        if module is None:
            continue
        if isinstance(module, nn.Embedding):
            _split_embedding(model, name, module, boxes, entry, group)
        elif entry.takes == Replicate() and name != "head":
            module.register_forward_pre_hook(_gather_first(group))
        if isinstance(module, nn.Linear) and entry.gives == Shard(1):
            _replace(model, name, RowLinear(module, group))
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_pre_hook(_own_positions(group))
    if model.norm is not None:
        table = "embed.weight" if model.head is None else "head.weight"
        model.cross_entropy = VocabCrossEntropy(boxes[table].offset[0], group)


def _split_embedding(
    model: Decoder,
    name: str,
    module: nn.Embedding,
    boxes: Mapping[str, Box],
    entry: Layout,
    group: TensorGroup,
) -> None:
    """All look up in a split table; each looks up its part of the sequence in a whole one."""
    if entry.gives == Shard(1):
        _replace(model, name, VocabEmbedding(module, boxes[f"{name}.weight"].offset[0], group))
    else:
        module.register_forward_pre_hook(lambda _, args: (args[0][:, group.own],))


def _gather_first(group: TensorGroup) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (group.gather(args[0]), *args[1:])

    return hook


def _own_positions(group: TensorGroup) -> Any:
    """Dropout's mask is a function of the place in the sample: give it those of this part."""

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, keys, positions = args
        return x, keys, positions[:, group.own]

    return hook


def _replace(model: Decoder, name: str, new: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_module(leaf, new)
