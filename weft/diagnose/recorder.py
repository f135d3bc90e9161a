"""Writes down checksums of what every module takes, gives and learns while a rank trains.

Forward hooks see the input and the output of each module that computes by itself and the output of
each block, before anything is cast or sent; hooks on the outputs see their gradients. Whatever the
plan, modules go by the names of the unsplit model and samples by their place in the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.axes.held import tiling
from weft.comm.comm import Comm
from weft.diagnose.trace import Grid, Kind, Record, Sketcher
from weft.models.decoder import Decoder
from weft.nn.dropout import Dropout
from weft.nn.stage import Stage
from weft.parallel.params import param_tilings
from weft.parallel.tensor.modules import RowLinear
from weft.plan.box import Box
from weft.plan.layout import Dim
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Seat
from weft.plan.tiling import split_evenly
from weft.schedules.registry import schedule_of
from weft.train.assemble import Built

WRAPPERS = ("product",)
"""Modules put around those of the model, as they appear in dotted names."""


TABLE_OF_POSITIONS = "positions"
"""Its weight is recorded; its result belongs to no sample."""


class Recorder:
    """Records one rank's part of every step. Made after ``assemble``; hooks stay for good."""

    def __init__(self, plan: Plan, spec: ModelSpec, seq_len: int, comm: Comm, grid: Grid) -> None:
        self.records: list[Record] = []
        self._seat = plan.seat(comm.rank)
        tilings = param_tilings(plan, spec)
        held = {n: t.boxes[comm.rank] for n, t in tilings.items() if comm.rank in t.boxes}
        self._boxes = {name: box for name, (box,) in held.items()}
        self._grid = grid
        self._sketcher = Sketcher(grid, comm.device)
        mesh = self._seat.stage_plan.mesh
        rows = tiling([Dim(name="seq", size=seq_len)], "stream", mesh).boxes[comm.rank]
        self._own_rows = {box.size[0]: box.offset[0] for box in (Box.whole((seq_len,)), *rows)}
        self._step = 0
        self._samples: tuple[int, ...] | None = None
        self._coming: Mapping[int, Iterator[tuple[int, ...]]] = {}
        self._params_seen: set[str] = set()

    def begin(self, step: int) -> None:
        """What follows is step ``step``, counted from 1."""
        self._step = step
        self._coming = {stage: iter(calls(self._seat, stage)) for stage in self._seat.stages}
        self._params_seen.clear()

    def gradients(self, built: Built, factor: float) -> None:
        """Once a step, when gradients are reduced: of what this rank owns.

        ``factor`` makes them those of the mean loss; before clipping, which mixes them all.
        """
        for main in built.gradients.mains:
            if main.owned and main.grad is not None:
                offset = (*main.box.offset, 0)[:2]
                grad = _as_matrix(main.grad.double() * factor)
                self._add("parameter gradient", main.spec.name, grad, offset, (0,))

    def watch(self, stages: Mapping[int, Stage]) -> None:
        """Put hooks on every module of this rank."""
        for number, stage in stages.items():
            model = stage.module
            assert isinstance(model, Decoder), "only decoders are traced"
            model.register_forward_pre_hook(partial(self._enter, number))
            model.register_forward_hook(self._leave)
            for name, block in model.layers.items():
                block.register_forward_hook(partial(self._see_output, f"layers.{name}"))
            for name, module in _computing(model):
                module.register_forward_hook(partial(self._see, name))
            if model.norm is not None:
                model.norm.register_forward_hook(partial(self._see_head, model))

    def _enter(self, number: int, _module: nn.Module, _given: Any) -> None:
        self._samples = next(self._coming[number])

    def _leave(self, *_: Any) -> None:
        self._samples = None

    def _see(self, name: str, module: nn.Module, given: tuple[Any, ...], result: Tensor) -> None:
        if self._samples is None:  # computed again in backward
            return
        for leaf, param in module.named_parameters():
            self._see_param(_logical(f"{name}.{leaf}"), param)
        if name == TABLE_OF_POSITIONS:
            return
        if isinstance(given[0], Tensor) and given[0].is_floating_point():
            self._see_activation("input", name, given[0], self._samples)
        self._see_output(name, module, given, result)

    def _see_output(self, name: str, _module: nn.Module, _given: Any, result: Tensor) -> None:
        if self._samples is None:
            return
        self._see_activation("output", name, result, self._samples)
        if result.requires_grad:
            see: Callable[[Tensor], None] = partial(self._see_gradient, name, self._samples)
            result.register_hook(see)  # type: ignore[no-untyped-call]

    def _see_gradient(self, name: str, samples: tuple[int, ...], grad: Tensor) -> None:
        self._see_activation("gradient", name, grad, samples)

    def _see_head(self, model: Decoder, *_: Any) -> None:
        """The head computes inside the loss; its weight is there when the final norm is."""
        module = model.embed if model.head is None else model.head
        if self._samples is not None and module is not None:
            name = "embed.weight" if model.head is None else "head.weight"
            self._see_param(name, module.weight)

    def _see_param(self, name: str, param: Tensor) -> None:
        if name not in self._params_seen:
            self._params_seen.add(name)
            offset = (*self._boxes[name].offset, 0)[:2]
            self._add("parameter", name, _as_matrix(param), offset, (0,))

    def _see_activation(self, kind: Kind, name: str, x: Tensor, samples: tuple[int, ...]) -> None:
        rows = x.flatten(2)  # [samples, seq, channels], heads put together
        assert len(rows) == len(samples), f"{name}: {len(rows)} of {len(samples)} samples"
        corner = (self._own_rows[rows.shape[1]], self._first_channel(kind, name))
        self._add(kind, name, rows, corner, samples)

    def _first_channel(self, kind: Kind, name: str) -> int:
        """Of the part that this rank holds."""
        owner, _, leaf = name.rpartition(".")
        source = f"{owner}.{leaf.removesuffix('_norm')}" if leaf in ("q_norm", "k_norm") else name
        box = self._boxes.get(f"{source}.weight")
        if box is None or len(box.offset) < 2 or leaf == "embed":
            return 0
        return box.offset[1] if kind == "input" and source == name else box.offset[0]

    def _add(
        self, kind: Kind, name: str, x: Tensor, corner: tuple[int, ...], samples: tuple[int, ...]
    ) -> None:
        with torch.no_grad():
            cells, values = self._sketcher.sketch(kind, name, x, (corner[0], corner[1]))
        self.records.append(Record(self._step, kind, name, samples, cells, values))


def calls(seat: Seat, stage: int) -> Iterator[tuple[int, ...]]:
    """The samples of each forward of one stage in a step, in the order of its schedule.

    Positions inside the global batch. A stage computes a microbatch in one pass or in several.
    """
    microbatches = seat.microbatches()
    passes = seat.pipeline_plan.stages[stage].passes
    for action in schedule_of(seat.pipeline_plan)[seat.position]:
        if action.kind != "F" or action.stage != stage:
            continue
        samples = microbatches[action.microbatch]
        start = samples.start
        for size in filter(None, split_evenly(len(samples), passes)):
            yield tuple(range(start, start + size))
            start += size


def _computing(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute by themselves, by their names in the unsplit model."""
    for name, module in model.named_modules():
        is_inside = name.endswith(".product")
        is_alone = isinstance(module, RowLinear) or not any(module.children())
        learns = any(True for _ in module.parameters()) or isinstance(module, Dropout)
        if is_alone and learns and not is_inside and name != "head":
            yield _logical(name), module


def _logical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _as_matrix(x: Tensor) -> Tensor:
    """``[rows]`` or ``[rows, columns]`` to ``[1, rows, columns]``."""
    assert x.dim() in (1, 2), f"a parameter of {x.dim()} dimensions"
    return x.reshape(1, x.shape[0], -1)
