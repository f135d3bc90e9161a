"""A plan as a picture: where every layer lies and how much of a batch flows past it.

One lane for each pipeline. Stages lie on the axis of the layers that all lanes share, so cuts at
different layers stand under each other; above them a bar as wide as the pipeline's part of the
global batch, cut into its microbatches. Equal neighbours are one lane when there are many.
This file only measures; ``assets/plan.svg.j2`` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

WIDTH = 960
"""Width of the picture; its text is 13 units high."""

_TO, _BY = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"

_MOST_LANES_UNFOLDED = 6
_AXIS_HEIGHT = 30
_LANE_GAP = 22
_STAGE_TOP = 44
_STAGE_TEXT_HEIGHT = 50
_CELL_WIDTH, _CELL_HEIGHT, _CELL_GAP = 30, 18, 4
_MOST_CELL_ROWS = 4
_PADDING = 10
_HEADING_CHARACTER, _DETAIL_CHARACTER = 7.8, 6.8
"""Widths of a character, on the generous side: fonts differ between machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineGroup:
    """Neighbouring pipelines that differ in their ranks alone."""

    first: int
    pipelines: tuple[PipelinePlan, ...]

    @property
    def name(self) -> str:
        last = self.first + len(self.pipelines) - 1
        return str(self.first) if last == self.first else f"{self.first}{_TO}{last}"

    @property
    def samples(self) -> int:
        """Samples of each global batch that the group takes."""
        return sum(pipeline.samples for pipeline in self.pipelines)


class Cell(NamedTuple):
    """One rank."""

    x: float
    y: float
    width: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBox:
    """One stage, its chips' kind as a number from 0, its text as far as it fits."""

    x: float
    y: float
    width: float
    kind: int
    cells: tuple[Cell, ...]
    tooltip: str
    heading: str = ""
    detail: str = ""

    @property
    def height(self) -> float:
        rows = len({cell.y for cell in self.cells})
        return _STAGE_TEXT_HEIGHT + rows * (_CELL_HEIGHT + _CELL_GAP) + 4 * bool(rows)

    @property
    def text_x(self) -> float:
        return self.x + _padding(self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One pipeline, or several equal ones."""

    y: float
    heading: str
    share_width: float
    ticks: tuple[float, ...]
    """Where the share's bar is cut into microbatches."""
    stages: tuple[StageBox, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Everything that is drawn, in units of a view box ``WIDTH`` wide."""

    width: float
    height: float
    title: str
    kinds: tuple[str, ...]
    """Kinds of chip in the order of their numbers."""
    axis: tuple[tuple[float, str], ...]
    """Middle of a label of the axis, and the label."""
    lanes: tuple[Lane, ...]


def pipeline_groups(plan: Plan) -> list[PipelineGroup]:
    """The pipelines in order; equal neighbours as one if there are more than six."""
    fold = len(plan.pipelines) > _MOST_LANES_UNFOLDED
    alike = groupby(
        enumerate(plan.pipelines), key=lambda item: _looks(item[1]) if fold else item[0]
    )
    runs = (list(run) for _, run in alike)
    return [PipelineGroup(first=r[0][0], pipelines=tuple(p for _, p in r)) for r in runs]


def picture(plan: Plan) -> Picture:
    """Lay a plan out."""
    kinds = tuple(dict.fromkeys(stage.device for _, _, stage in plan.stages()))
    scale = _Scale(plan.num_layers)
    lanes: list[Lane] = []
    y = float(_AXIS_HEIGHT)
    for group in pipeline_groups(plan):
        lanes.append(_lane(group, plan, scale, kinds, y))
        y += _STAGE_TOP + max(box.height for box in lanes[-1].stages) + _LANE_GAP
    return Picture(
        width=WIDTH,
        height=y - _LANE_GAP + 2,
        title=summary(plan),
        kinds=kinds,
        axis=tuple(scale.labels()),
        lanes=tuple(lanes),
    )


def summary(plan: Plan) -> str:
    """The plan in a sentence."""
    stages = {len(pipeline.stages) for pipeline in plan.pipelines}
    depth = f"{min(stages)}" if len(stages) == 1 else f"{min(stages)} to {max(stages)}"
    return (
        f"{_count(plan.num_layers, 'layer')} on {_count(plan.world_size, 'rank')} in "
        f"{_count(len(plan.pipelines), 'pipeline')} of {depth} stage{'s' * (stages != {1})}, "
        f"{_count(plan.global_batch, 'sample')} a step."
    )


def ranges(numbers: Sequence[int], *, dash: str = _TO) -> str:
    """``0-3, 6`` (with an en dash) for (0, 1, 2, 3, 6)."""
    rising = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = ([number for _, number in run] for _, run in rising)
    return ", ".join(f"{r[0]}{dash}{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def layers_in_words(stage: StagePlan, *, is_first: bool, is_last: bool) -> str:
    """``embedding, layers 0-5, head`` (with an en dash)."""
    low, high = stage.layers
    middle = f"layers {ranges(range(low, high))}" if high > low + 1 else f"layer {low}"
    parts = ["embedding"] * is_first + [middle] * (high > low) + ["head"] * is_last
    return ", ".join(parts) or "no layers"


def mesh_in_words(stage: StagePlan) -> str:
    """``dp 4 x tp 2`` (with a multiplication sign); empty for a single rank."""
    return f" {_BY} ".join(f"{axis} {size}" for axis, size in stage.mesh.axes if size > 1)


class _Scale:
    """The axis of the layers: embedding, layers, head, from left to right."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._end = max(0.6, 0.06 * num_layers)  # the embedding's and the head's part, in layers
        self._unit = WIDTH / (num_layers + 2 * self._end)

    def span(
        self, layers: tuple[int, int], *, is_first: bool, is_last: bool
    ) -> tuple[float, float]:
        """Left edge and width of a stage."""
        left = 0.0 if is_first else (self._end + layers[0]) * self._unit
        right = WIDTH if is_last else (self._end + layers[1]) * self._unit
        return left, right - left

    def labels(self) -> Iterator[tuple[float, str]]:
        """Embedding, as many layers as there is room for, head."""
        every = next(
            step
            for power in range(9)
            for step in (10**power, 2 * 10**power, 5 * 10**power)
            if step * self._unit >= 26
        )
        yield self._end / 2 * self._unit, self._end_label("embedding", "embed", "E")
        for layer in range(0, self._num_layers, every):
            yield (self._end + layer + 0.5) * self._unit, str(layer)
        yield WIDTH - self._end / 2 * self._unit, self._end_label("head", "head", "H")

    def _end_label(self, *texts: str) -> str:
        return _fitting(self._end * self._unit, _DETAIL_CHARACTER, texts)


def _lane(
    group: PipelineGroup, plan: Plan, scale: _Scale, kinds: tuple[str, ...], y: float
) -> Lane:
    pipeline, several = group.pipelines[0], len(group.pipelines)
    share = group.samples / plan.global_batch if plan.global_batch else 0.0
    width, cuts = share * WIDTH, pipeline.num_microbatches * several
    ticks = [width * cut / cuts for cut in range(1, cuts)] if cuts and width / cuts >= 6 else []
    boxes, headings, details = [], [], []
    for number, stage in enumerate(pipeline.stages):
        ends = {"is_first": number == 0, "is_last": number == len(pipeline.stages) - 1}
        left, span = scale.span(stage.layers, **ends)
        x, top, room = left + 1, y + _STAGE_TOP, max(2.0, span - 2)
        headings.append(_headings(number, stage, **ends))
        details.append(_details(stage, folded=several > 1))
        boxes.append(
            StageBox(
                x=x,
                y=top,
                width=room,
                kind=kinds.index(stage.device),
                cells=_cells(stage.mesh.ranks, x=x, y=top, width=room) if several == 1 else (),
                tooltip=f"{headings[-1][0]}; {details[-1][0]}",
            )
        )
    rooms = [box.width - 2 * _padding(box.width) for box in boxes]
    fitted = zip(
        boxes,
        _same_form(rooms, headings, _HEADING_CHARACTER),
        _same_form(rooms, details, _DETAIL_CHARACTER),
        strict=True,
    )
    return Lane(
        y=y,
        heading=_lane_heading(group, plan, share),
        share_width=width,
        ticks=tuple(ticks),
        stages=tuple(replace(box, heading=h, detail=d) for box, h, d in fitted),
    )


def _lane_heading(group: PipelineGroup, plan: Plan, share: float) -> str:
    pipeline, several = group.pipelines[0], len(group.pipelines)
    parts = [f"Pipeline {group.name}" if several == 1 else f"Pipelines {group.name}, all equal"]
    each = "" if several == 1 else " each"
    parts.append(f"{group.samples:,} of {plan.global_batch:,} samples a step ({share:.0%})")
    microbatches = _count(pipeline.num_microbatches, "microbatch", "microbatches")
    parts.append(f"{microbatches} of {pipeline.microbatch:,}{each}")
    parts += [f"schedule {pipeline.schedule}"] if len(pipeline.stages) > 1 else []
    return " · ".join(parts)


def _padding(width: float) -> float:
    """Between an edge of a stage that is so wide and its text."""
    return min(_PADDING, width / 12)


def _headings(number: int, stage: StagePlan, *, is_first: bool, is_last: bool) -> tuple[str, ...]:
    """What a stage may be called, from the fullest form to the shortest."""
    words = layers_in_words(stage, is_first=is_first, is_last=is_last)
    short = ranges(range(*stage.layers))
    return f"stage {number}: {words}", words, f"layers {short}", short


def _details(stage: StagePlan, *, folded: bool) -> tuple[str, ...]:
    """What a stage may say about itself, from the fullest form to the shortest."""
    ranks = stage.mesh.ranks
    one_by_one = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    who = f"{_count(len(ranks), 'rank')} each" if folded else one_by_one
    chip = f"{stage.device} {stage.precision}"
    settings = [f"ZeRO {stage.zero}"] * bool(stage.zero)
    settings += [f"{stage.passes} passes"] * (stage.passes > 1)
    settings += ["recompute"] * (stage.recompute == "full") + ["compiled"] * stage.compile
    everything = " · ".join(filter(None, [who, mesh_in_words(stage), chip, *settings]))
    return everything, f"{who} · {chip}", who, chip, stage.device


def _same_form(
    rooms: Sequence[float], forms: Sequence[tuple[str, ...]], character: float
) -> list[str]:
    """The fullest form that fits every stage of a lane; where none does, what fits each."""
    for same in zip(*forms, strict=True):
        fitted = [_fitting(room, character, [text]) for room, text in zip(rooms, same, strict=True)]
        if fitted == list(same):
            return fitted
    return [_fitting(room, character, texts) for room, texts in zip(rooms, forms, strict=True)]


def _cells(ranks: tuple[int, ...], *, x: float, y: float, width: float) -> tuple[Cell, ...]:
    """A box for every rank, in rows, in a stage at this place; none where they would not fit."""
    padding = _padding(width)
    each = max(_CELL_WIDTH, len(str(max(ranks))) * _DETAIL_CHARACTER + 10)
    columns = int((width - 2 * padding + _CELL_GAP) // (each + _CELL_GAP))
    if not columns or -(-len(ranks) // columns) > _MOST_CELL_ROWS:
        return ()
    return tuple(
        Cell(
            x=x + padding + index % columns * (each + _CELL_GAP),
            y=y + _STAGE_TEXT_HEIGHT + index // columns * (_CELL_HEIGHT + _CELL_GAP),
            width=each,
            text=str(rank),
        )
        for index, rank in enumerate(ranks)
    )


def _looks(pipeline: PipelinePlan) -> PipelinePlan:
    """The pipeline with its ranks counted from 0 in every stage."""
    stages = tuple(
        replace(stage, mesh=Mesh(tuple(range(len(stage.mesh.ranks))), stage.mesh.axes))
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def _fitting(width: float, character: float, texts: Sequence[str]) -> str:
    """The first text that fits into ``width``; empty if none does."""
    return next((text for text in texts if len(text) * character <= width), "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
