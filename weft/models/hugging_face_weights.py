"""Weights in a folder of Hugging Face safetensors, read where they lie: the files are mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.config.errors import ConfigError
from weft.models.config_folder import read_json, read_spec
from weft.models.config_json import Entry
from weft.models.registry import param_specs
from weft.plan.box import Box

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of one of our parameters, in one of their tensors."""

    box: Box
    """Of ours: all of it, or one of a stack."""
    stored: Callable[[], Tensor]
    first: int
    """Of the last dimension of theirs, which may hold several of ours side by side."""
    transposed: bool

    def view(self) -> Tensor:
        """``[*box.size]``, in the file's dtype; nothing is copied."""
        *_, rows, columns = (1, *self.box.size)
        width = rows if self.transposed else columns
        found = self.stored().narrow(-1, self.first, width)
        return (found.T if self.transposed else found).view(self.box.size)


class HuggingFaceWeights:
    """The parameters in a folder of an architecture that Weft's families cover, by logical name.

    Raises ConfigError: an architecture, a field or a tensor that Weft does not know, lacks or finds
    damaged; weights in pickles.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec, converter = read_spec(folder)
        self._shapes = {param.name: param.shape for param in param_specs(self.spec)}
        entries = converter.entries(self.spec)
        wanted = {entry.theirs for entry in entries}
        found = _tensors(folder, converter.prefix)
        where = f"Looked in {folder}."
        for name in found:
            if name not in wanted and not name.endswith((*converter.ignored, HEAD)):
                raise ConfigError("tensor", name, "a parameter of this architecture", where)
        self._parts: dict[str, list[_Part]] = {}
        for entry in entries:
            if entry.theirs not in found:
                raise ConfigError("tensor", entry.theirs, "to be in the folder", where)
            self._place(entry, found[entry.theirs])
        copy = found.get(HEAD) if HEAD not in wanted else None
        if copy is not None and not torch.equal(copy(), self._parts["embed.weight"][0].view()):
            expected = "the embedding's values where tie_word_embeddings is true"
            raise ConfigError("tensor", HEAD, expected, where)

    def names(self) -> list[str]:
        """Of all parameters."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole parameter."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """A whole parameter in its file's dtype; of a plain one the mapped file, not a copy."""
        parts = [part.view() for part in self._parts[name]]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def read_into(self, out: Tensor, name: str, *, box: Box | None = None) -> None:
        """Copy the elements of ``box`` (None: all of them) into ``out``: ``[*box.size]``, of any
        dtype, on any device. Touches only the pages that the box needs."""
        wanted = Box.whole(self.shape(name)) if box is None else box
        for part in self._parts[name]:
            common = part.box.intersect(wanted)
            if common is not None:
                found = part.view()[common.within(part.box).slices()]
                out.detach()[common.within(wanted).slices()].copy_(found)

    def _place(self, entry: Entry, stored: Callable[[], Tensor]) -> None:
        """Say where parameters are that one of their tensors holds."""
        shapes = [self._shapes[name] for name in entry.ours]
        boxes = [_box(shape, entry.at) for shape in shapes]
        inner = [shape if entry.at is None else shape[1:] for shape in shapes]
        theirs = [shape[::-1] if entry.transposed else shape for shape in inner]
        expected = (*theirs[0][:-1], sum(shape[-1] for shape in theirs))
        found = tuple(stored().shape)
        if found != expected:
            text = "x".join(map(str, expected))
            raise ConfigError(f"tensor {entry.theirs}", list(found), f"a shape of {text}")
        first = 0
        for name, box, shape in zip(entry.ours, boxes, theirs, strict=True):
            part = _Part(box, stored, first, entry.transposed)
            self._parts.setdefault(name, []).append(part)
            first += shape[-1]


def _box(shape: tuple[int, ...], at: int | None) -> Box:
    """A whole parameter, or this element of a stack of them."""
    if at is None:
        return Box.whole(shape)
    return Box((at, *(0 for _ in shape[1:])), (1, *shape[1:]))


def _tensors(folder: Path, prefix: str) -> dict[str, Callable[[], Tensor]]:
    """By full name what gives a tensor of the mapped files.

    A file of the bare model leaves the prefix out of every name but the head's.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    for path in _weight_files(folder):
        try:
            file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ConfigError("file", str(path), "a sound safetensors file", f"{error}.") from None
        found |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    if any(name.startswith(prefix) for name in found):
        return found
    return {name if name == HEAD else prefix + name: read for name, read in found.items()}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(INDEX, str(index), "a weight_map inside")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickle = min((path.name for path in folder.glob("*.bin")), default="")
        hint = pickle and (
            f"{pickle} is a pickle, which can run code and is never opened here; from_pretrained "
            "and save_pretrained of transformers write safetensors in a place you trust."
        )
        raise ConfigError("folder", str(folder), "safetensors files inside", hint)
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(INDEX, name, "a file in the same folder")
    return [folder / name for name in names]
