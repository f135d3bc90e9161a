"""A model of which only some weights are in memory at a time, read from where they are saved as it
computes: layer by layer, the next one while one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from math import ceil, gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.checkpoint.entry import CHUNK_BYTES
from weft.checkpoint.whole import Saved
from weft.config.errors import ConfigError, RunError
from weft.models.registry import build_model
from weft.nn.context import Context
from weft.nn.shapes import only_shapes
from weft.plan.box import Box
from weft.plan.model import ModelSpec

PART_BYTES = 8 << 20
"""Of the vocabulary's tables, which are read and multiplied in rows."""
Weights = dict[str, Tensor]


class Streamed(nn.Module):
    """The unsplit model in fp32, for inference on the processor; see ``load_weights``.

    As many layers as there is room for stay in memory. Of the others there are two at a time, and
    of the tables of the vocabulary two parts.

    Raises:
        ConfigError: ``most_bytes`` is too little for that.
        CheckpointError: a file is damaged, now or when it computes.
        RunError: weights are not finite, when it computes.
    """

    def __init__(self, spec: ModelSpec, saved: Saved, most_bytes: int) -> None:
        super().__init__()
        with only_shapes():
            model = build_model(spec)
        whole_bytes = 4 * _numel(model)
        self.model, self.spec = model.eval().requires_grad_(requires_grad=False), model.spec
        self.here = nn.Parameter(torch.empty(0), requires_grad=False)
        """The first of its parameters, on the device that computes; layers' may be on none."""
        self._saved = saved
        self._ahead = ThreadPoolExecutor(1, "weights ahead")
        self._finite = set[tuple[str, Box]]()
        self._head = "embed.weight" if model.head is None else "head.weight"
        model.embed = _Rows(self, "embed.weight")  # type: ignore[assignment]
        model.head = None
        self._step = _rows_of_part(4 * self.spec.d_model)
        room = self._admit(most_bytes, whole_bytes)
        largest = max(map(_numel, model.blocks()))
        self._layers = [torch.empty(largest) for _ in range(2)]
        self._parts = [torch.empty(self._step * self.spec.d_model) for _ in range(2)]
        self._reads: list[Callable[[Tensor], Weights]] = []
        self._coming: Future[Weights] | None = None
        for name, block in model.layers.items():
            room -= 4 * _numel(block)
            if room >= 0 and not self._reads:
                self._stay(f"layers.{name}", block)
                continue
            block.register_forward_pre_hook(partial(self._bring, len(self._reads)))
            block.register_forward_hook(_let_go)
            self._reads.append(partial(self._load, f"layers.{name}", block))

    def _admit(self, most_bytes: int, whole_bytes: int) -> int:
        """Read what stands beside layers and tables; the bytes that are left for layers to stay.

        ``whole_bytes``: with which nothing has to be read again, of a small model less than the
        least otherwise.
        """
        beside = [(n, m) for n, m in self.model.named_children() if n not in ("embed", "layers")]
        largest = max(map(_numel, self.model.blocks())) + self._step * self.spec.d_model
        least = 8 * largest + 4 * sum(_numel(module) for _, module in beside)
        if most_bytes < least:
            hint = "That holds two layers, two parts of tables and what stands beside."
            if whole_bytes <= least:
                hint = "That holds the whole model."
            expected = f"at least {ceil(min(least, whole_bytes) / 1e6)}MB"
            raise ConfigError("--memory", f"{most_bytes / 1e6:g}MB", expected, hint)
        for name, module in beside:
            self._stay(name, module)
        return most_bytes - least

    def _stay(self, key: str, module: nn.Module) -> None:
        room = torch.empty(_numel(module))
        module.load_state_dict(self._load(key, module, room), assign=True)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """As the model's."""
        result: Tensor = self.model(tokens, context)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """As the model's."""
        rows = range(self.spec.vocab_size)
        found = [F.linear(hidden, part) for _, part in self.parts(self._head, rows)]
        return torch.cat(found, dim=-1)

    def parts(self, name: str, rows: Collection[int]) -> Iterator[tuple[int, Tensor]]:
        """Of a table those parts that have some of these rows, each with the number of its first
        one; the next is read while one is used."""
        height, width = self.spec.vocab_size, self.spec.d_model
        firsts = sorted({row // self._step * self._step for row in rows})
        boxes = [Box((first, 0), (min(self._step, height - first), width)) for first in firsts]
        rooms = cycle(self._parts)
        reads = [self._ahead.submit(self._read, name, box, next(rooms)) for box in boxes[:1]]
        for number, first in enumerate(firsts):
            part = reads.pop().result()
            coming = boxes[number + 1 : number + 2]
            reads = [self._ahead.submit(self._read, name, box, next(rooms)) for box in coming]
            yield first, part

    def _load(self, key: str, module: nn.Module, room: Tensor) -> Weights:
        """Parameters of a module, by their names in it."""
        found, start = {}, 0
        for name, param in module.named_parameters():
            found[name] = self._read(f"{key}.{name}", Box.whole(tuple(param.shape)), room[start:])
            start += param.numel()
        return found

    def _read(self, name: str, box: Box, room: Tensor) -> Tensor:
        """A part of a parameter, at the beginning of some memory."""
        found = room[: box.numel].view(box.size)
        self._saved.read_into(found, name, box=box)
        place = (name, box)
        if place not in self._finite and not torch.stack(torch.aminmax(found)).isfinite().all():
            problem = "holds weights that are not finite: its training diverged, so it cannot write"
            raise RunError(f"{self._saved.folder}: {problem}")
        self._finite.add(place)
        return found

    def _bring(self, number: int, block: nn.Module, _: Any) -> None:
        """Before a layer computes: its weights are there, and the next one's on their way."""
        coming = self._coming or self._ahead.submit(self._reads[number], self._layers[0])
        block.load_state_dict(coming.result(), assign=True)
        self._layers.reverse()
        read = self._reads[(number + 1) % len(self._reads)]
        self._coming = self._ahead.submit(read, self._layers[0])


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _rows_of_part(row_bytes: int) -> int:
    """Whole chunks of a table, which have checksums, where that is possible."""
    most, chunks = PART_BYTES // row_bytes, CHUNK_BYTES // gcd(CHUNK_BYTES, row_bytes)
    return most // chunks * chunks or max(most, 1)


def _let_go(block: nn.Module, *_: Any) -> None:
    block.to("meta")


class _Rows(nn.Module):
    """The vocabulary's table where tokens enter."""

    def __init__(self, of: Streamed, name: str) -> None:
        super().__init__()
        self._parts, self._width = partial(of.parts, name), of.spec.d_model

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, d_model]``."""
        found = torch.empty(*tokens.shape, self._width)
        for first, part in self._parts({*tokens.flatten().tolist()}):
            here = (tokens >= first) & (tokens < first + len(part))
            found[here] = part[tokens[here] - first]
        return found
