"""Checksums of what modules take, give and learn: the same under every plan.

Forward hooks see the input and the output of each module that computes by itself and the output of
each block, before anything is cast or sent; hooks on the outputs see their gradients. Whatever the
plan, modules go by the names of the unsplit model and samples by their place in the global batch.

A tensor ``x`` of rows and columns (an activation of one sample: positions and channels; a matrix)
is kept as a few random projections ``sum of x[i, j] u[i] v[j]`` with signs ``u``, ``v`` that follow
from its name and the index alone, and its sum of squares. Whoever holds a part adds up his part;
the expected square of a projection of a difference is the squared norm of the difference, so no
large tensor need be kept to see by how much two of them differ (Johnson and Lindenstrauss 1984,
with the signs of Achlioptas 2003).

Both plans' borders cut a tensor into cells. A cell lies on whole ranks under either plan, so a
difference can be laid to the ranks that hold it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from weft.axes.held import tiling
from weft.comm.comm import Comm
from weft.data.hashing import draw, make_key
from weft.models.decoder import Decoder
from weft.nn.dropout import Dropout
from weft.nn.experts.feed_forward import Experts
from weft.nn.stage import Stage
from weft.parallel.params import param_tilings
from weft.parallel.tp.modules import RowLinear
from weft.plan.box import Box
from weft.plan.layout import Dim, Form
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, RankPlan
from weft.plan.tiling import split_evenly
from weft.schedules.registry import schedule_of
from weft.train.assemble import Built

PROJECTIONS = 4
"""A difference escapes one with probability 1/2 at worst (two elements that changed places)."""

TABLE_OF_POSITIONS = "positions"
"""Its weight is recorded; its result belongs to no sample."""

Kind = Literal["parameter", "input", "output", "gradient", "parameter gradient"]
"""``gradient`` is that of a module's output. The order is that in which a step makes them."""

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Record:
    """Checksums of one tensor, of as many samples as were computed together."""

    step: int
    """Counted from 1, as in metrics."""
    kind: Kind
    name: str
    """Of the module or the parameter in the unsplit model."""
    samples: tuple[int, ...]
    """Positions inside the global batch; ``(0,)`` for parameters."""
    cells: tuple[int, ...]
    values: Array
    """``[samples, cells, PROJECTIONS + 1]`` fp64; the last is the sum of squares."""


@dataclass(frozen=True)
class Grid:
    """How the borders of some plans cut every tensor of a model."""

    sequence: tuple[int, ...]
    """Borders along the positions of a sample."""
    params: Mapping[str, tuple[tuple[int, ...], ...]]
    """Borders along each dimension of each parameter."""
    d_model: int

    @staticmethod
    def of(plans: Sequence[Plan], spec: ModelSpec, seq_len: int) -> Grid:
        """The common refinement of these plans' tilings."""
        borders: dict[str, list[set[int]]] = {}
        for name, tiled in (item for p in plans for item in param_tilings(p, spec).items()):
            sets = borders.setdefault(name, [set() for _ in tiled.shape])
            for box in tiled.distinct():
                for found, low, high in zip(sets, box.offset, box.end, strict=True):
                    found.update((low, high))
        params = {name: tuple(tuple(sorted(s)) for s in sets) for name, sets in borders.items()}
        return Grid(tuple(sorted({0, *_ends_of_parts(plans, seq_len)})), params, spec.d_model)

    def borders(self, kind: Kind, name: str) -> tuple[tuple[int, ...], ...]:
        """The lines that cut right through one tensor of two dimensions: its rows, its columns."""
        if kind in ("parameter", "parameter gradient"):
            return (*self.params[name], (0, 1))[:2]
        source, dim = channels_from(kind, name)
        borders = self.params.get(source, ())
        return self.sequence, borders[dim] if len(borders) > 1 else (0, self.d_model)

    def cells(self, kind: Kind, name: str) -> list[Box]:
        """The cells between them, row by row."""
        rows, columns = self.borders(kind, name)
        return [
            Box((top, left), (bottom - top, right - left))
            for (top, bottom), (left, right) in product(pairwise(rows), pairwise(columns))
        ]


def _ends_of_parts(plans: Sequence[Plan], seq_len: int) -> set[int]:
    """Where the parts of a sample end that ranks hold between modules."""
    meshes = {stage.mesh for plan in plans for _, _, stage in plan.stages()}
    rows = [tiling([Dim(name="seq", size=seq_len)], "stream", mesh) for mesh in meshes]
    return {
        end for tiled in rows for box in tiled.distinct() for end in (box.offset[0], box.end[0])
    }


def channels_from(kind: Kind, name: str) -> tuple[str, int]:
    """The parameter, and its dimension, that cuts the channels of what a module takes or gives.

    A linear layer's weight says both; heads are normalised where they were made. The name of no
    parameter, or of one of a single dimension: nothing cuts them.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf in ("q_norm", "k_norm"):
        return f"{owner}.{leaf[0]}.weight", 0
    return "" if leaf == "embed" else f"{name}.weight", int(kind == "input")


class Recorder:
    """Records one rank's part of every step. Made after ``assemble``; hooks stay for good."""

    def __init__(self, plan: Plan, spec: ModelSpec, seq_len: int, comm: Comm, grid: Grid) -> None:
        self.records: list[Record] = []
        self._rank_plan = plan.rank_plan(comm.rank)
        tilings = param_tilings(plan, spec)
        held = {n: t.boxes[comm.rank] for n, t in tilings.items() if comm.rank in t.boxes}
        self._boxes = {name: box for name, (box,) in held.items()}
        self._grid = grid
        self._device = comm.device
        self._signs: dict[tuple[str, int, int], Tensor] = {}
        mesh = self._rank_plan.stage_plan.mesh
        forms: tuple[Form, ...] = ("batch", "inner", "stream")
        lying = [tiling([Dim(name="seq", size=seq_len)], form, mesh) for form in forms]
        parts = [tiled.boxes[comm.rank] for tiled in lying]
        self._own_rows = {sum(box.size[0] for box in boxes): boxes for boxes in parts}
        self._step = 0
        self._samples: tuple[int, ...] | None = None
        self._coming: Mapping[int, Iterator[tuple[int, ...]]] = {}
        self._params_seen: set[str] = set()

    def begin(self, step: int) -> None:
        """What follows is step ``step``, counted from 1."""
        self._step = step
        self._coming = {
            stage: iter(calls(self._rank_plan, stage)) for stage in self._rank_plan.stages
        }
        self._params_seen.clear()

    def gradients(self, built: Built, factor: float) -> None:
        """Once a step, when gradients are reduced: of what this rank owns.

        ``factor`` makes them those of the mean loss; before clipping, which mixes them all. None
        of stacked experts, which are no matrices.
        """
        for main in built.gradients.mains:
            if main.owned and main.grad is not None and main.grad.dim() < 3:
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
            is_cut = self._rank_plan.pipeline_plan.stages[number].cut[1]
            whole = len(model.layers) - is_cut  # what a cut one gives is in the middle of a layer
            for name, block in islice(model.layers.items(), whole):
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
            self._see_activation("input", name, self._samples, given[0])
        self._see_output(name, module, given, result)

    def _see_output(
        self, name: str, _module: nn.Module, _given: Any, result: Tensor | tuple[Tensor, Tensor]
    ) -> None:
        if self._samples is None:
            return
        result = (
            result if isinstance(result, Tensor) else result[0]
        )  # beside what it adds to the loss
        self._see_activation("output", name, self._samples, result)
        if result.requires_grad:
            see = partial(self._see_activation, "gradient", name, self._samples)
            result.register_hook(see)  # type: ignore[no-untyped-call]

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

    def _see_activation(self, kind: Kind, name: str, samples: tuple[int, ...], x: Tensor) -> None:
        rows = x.flatten(2)  # [samples, seq, channels], heads put together
        assert len(rows) == len(samples), f"{name}: {len(rows)} of {len(samples)} samples"
        source, dim = channels_from(kind, name)
        box = self._boxes.get(source)
        first = 0 if box is None or len(box.offset) < 2 else box.offset[dim]
        boxes = self._own_rows[rows.shape[1]]
        for part, row in zip(torch.split(rows, [b.size[0] for b in boxes], 1), boxes, strict=True):
            self._add(kind, name, part, (row.offset[0], first), samples)

    def _add(
        self, kind: Kind, name: str, x: Tensor, corner: tuple[int, ...], samples: tuple[int, ...]
    ) -> None:
        """Record a part ``x`` ``[samples, rows, columns]`` that begins at ``corner``.

        A part that fills a cell only in part gives its term of the cell's sums.
        """
        borders = self._grid.borders(kind, name)
        ends = [at + size for at, size in zip(corner, x.shape[1:], strict=True)]
        (rows, heights), (columns, widths) = map(_cut, borders, corner, ends)
        up, across = (
            self._signs_of(name, dim, borders[dim][-1])[corner[dim] : ends[dim]] for dim in (0, 1)
        )
        wide = torch.split(x.detach().to(torch.float64), widths, 2)
        lines = [
            torch.cat([part @ signs, part.square().sum(2, keepdim=True)], dim=2)
            for part, signs in zip(wide, torch.split(across, widths), strict=True)
        ]
        up = nn.functional.pad(up, (0, 1), value=1.0)  # squares have no sign
        by_row = torch.split(torch.stack(lines, 2), heights, 1)
        sums = [
            torch.einsum("srck,rk->sck", part, signs)
            for part, signs in zip(by_row, torch.split(up, heights), strict=True)
        ]
        held = [row * (len(borders[1]) - 1) + column for row in rows for column in columns]
        values = torch.cat(sums, dim=1).cpu().numpy()
        self.records.append(Record(self._step, kind, name, samples, tuple(held), values))

    def _signs_of(self, name: str, dim: int, size: int) -> Tensor:
        """``[size, PROJECTIONS]`` of +1 and -1."""
        key = (name, dim, size)
        if key not in self._signs:
            drawn = draw(make_key("signs", name, dim), np.arange(size, dtype=np.int64))
            bits = (drawn[:, None] >> np.arange(8, 8 + PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
            signs = torch.from_numpy(2.0 * bits.astype(np.float64) - 1.0)
            self._signs[key] = signs.to(self._device)
        return self._signs[key]


def calls(rank_plan: RankPlan, stage: int) -> Iterator[tuple[int, ...]]:
    """The samples of each forward of one stage in a step, in the order of its schedule.

    Positions inside the global batch. A stage computes a microbatch in one pass or in several.
    """
    microbatches = rank_plan.microbatches()
    passes = rank_plan.pipeline_plan.stages[stage].passes
    for action in schedule_of(rank_plan.pipeline_plan)[rank_plan.position]:
        if action.kind != "F" or action.stage != stage:
            continue
        samples = microbatches[action.microbatch]
        start = samples.start
        for size in filter(None, split_evenly(len(samples), passes)):
            yield tuple(range(start, start + size))
            start += size


def _computing(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute by themselves, by their names in the unsplit model; none of experts,
    whose rows are sorted: what their layer gives is seen."""
    experts = tuple(f"{n}." for n, each in model.named_modules() if isinstance(each, Experts))
    for name, module in model.named_modules():
        is_inside = name.endswith(".product") or name.startswith(experts)
        is_alone = isinstance(module, RowLinear) or not any(module.children())
        learns = any(True for _ in module.parameters()) or isinstance(module, Dropout)
        if is_alone and learns and not is_inside and name != "head":
            yield _logical(name), module


def _cut(borders: tuple[int, ...], first: int, end: int) -> tuple[range, list[int]]:
    """The parts between borders that the places from ``first`` to ``end`` are in, and how many of
    them are in each."""
    parts = range(bisect_right(borders, first) - 1, bisect_left(borders, end))
    ends = [first, *borders[parts.start + 1 : parts.stop], end]
    return parts, [high - low for low, high in pairwise(ends)]


def _logical(name: str) -> str:
    """Without the modules put around those of the model."""
    return name.replace(".product", "")


def _as_matrix(x: Tensor) -> Tensor:
    """``[rows]`` or ``[rows, columns]`` to ``[1, rows, columns]``."""
    assert x.dim() in (1, 2), f"a parameter of {x.dim()} dimensions"
    return x.reshape(1, x.shape[0], -1)
