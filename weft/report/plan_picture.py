"""A plan as a picture: where every layer lies and how much of a batch flows past it.

One lane for each pipeline. Stages lie on the axis of the layers that all lanes share, so cuts at
different layers stand under each other; above them a bar as wide as the pipeline's part of the
global batch, cut into its micro-batches. Equal neighbours are one lane when there are many. Vendors
of chips have colours, kinds of one vendor shades of it. This file only measures;
``assets/plan.svg.j2`` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, floor
from typing import NamedTuple

from markupsafe import Markup

from weft.cluster.cluster import Chip, Cluster
from weft.config.axes import NAMES, TOLD, UNLIKE
from weft.plan.borders import Layers
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.naming import elsewhere
from weft.recompute.asked import in_short
from weft.report.svg import fill_legend

WIDTH = 960
"""Of the picture, where every stage has room for its words; its text is 13 units high."""
_WIDEST = 3.0
"""Times ``WIDTH``, for plans with narrow stages."""
_ROOM = 90
"""What a stage should have."""

_TO, _BY = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"

_MOST_LANES_UNFOLDED = 6
_AXIS_HEIGHT = 30
_LANE_GAP = 22
_STAGE_TOP = 44
_STAGE_HEIGHT = 100
_PADDING = 10
_CHARACTER = 7.0
"""Width of a character, on the generous side: fonts differ between machines."""
_COLOURS, _SHADES = 5, 3
"""Of the style sheet: for vendors, and for the kinds of one."""


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


class Kind(NamedTuple):
    """Of a chip."""

    name: str
    vendor: str = ""
    """Empty: not known."""

    @property
    def words(self) -> str:
        """``NVIDIA H100-SXM5-80GB``."""
        return f"{self.vendor} {self.name}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBox:
    """One stage, and its text as far as it fits."""

    x: float
    y: float
    width: float
    height: float
    look: str
    """Classes of the style sheet, by the kind of its chips."""
    tooltip: str
    lines: tuple[str, ...] = ()
    """Its layers, chips, mesh, ranks and settings; empty where there is no room for any."""

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
    """Everything that is drawn."""

    width: float
    height: float
    title: str
    legend: Markup
    """The kinds of chips."""
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


def picture(plan: Plan, chips: Mapping[int, Chip] | None = None) -> Picture:
    """Lay a plan out. ``chips``: of its ranks, where they are known."""
    known = chips or {}
    drawing = _Drawing(plan, known)
    lanes: list[Lane] = []
    y = float(_AXIS_HEIGHT)
    for group in pipeline_groups(plan):
        lanes.append(drawing.lane(group, y))
        y += _STAGE_TOP + _STAGE_HEIGHT + _LANE_GAP
    return Picture(
        width=drawing.scale.width,
        height=y - _LANE_GAP + 2,
        title=summary(plan),
        legend=fill_legend((f"chip {look}", kind.words) for kind, look in drawing.looks.items()),
        axis=tuple(drawing.scale.labels()),
        lanes=tuple(lanes),
    )


def chips_of(plan: Plan, cluster: Cluster | None) -> dict[int, Chip]:
    """The chip of each rank; empty where the machines' chips are not those of the plan."""
    found = [chip for node in cluster.nodes for chip in node.chips] if cluster else []
    return dict(enumerate(found)) if [c.device for c in found] == plan.devices else {}


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


def layers_held(layers: Layers, *, dash: str = _TO) -> list[str]:
    """``rest of 2``, ``3-5`` (with an en dash), ``part of 6`` for what is held from the middle of
    layer 2 to that of layer 6."""
    first, end = layers
    whole = ranges(range(ceil(first), floor(end)), dash=dash)
    before = [f"rest of {floor(first)}"] * (first % 1 > 0)
    return [*before, *filter(None, [whole]), *[f"part of {floor(end)}"] * (end % 1 > 0)]


def layers_in_words(stage: StagePlan, *, is_first: bool, is_last: bool) -> str:
    """``embedding, layers 0-5, head`` (with an en dash)."""
    held = ", ".join(layers_held(stage.layers)) if stage.blocks else ""
    if len(stage.blocks) > 1:
        middle = f"layers {held}"
    else:
        middle = held.replace("of", "of layer") if any(stage.cut) else f"layer {held}"
    parts = ["embedding"] * is_first + [middle] * bool(held) + [head_in_words(stage)] * is_last
    return ", ".join(parts) or "no layers"


def head_in_words(stage: StagePlan, *, dash: str = _TO) -> str:
    """``head``, or ``head rows 0-99`` (with an en dash) of a part of it."""
    return f"head rows {ranges(range(*stage.head_rows), dash=dash)}" if stage.head_rows else "head"


def mesh_in_words(stage: StagePlan) -> str:
    """``dp 4 x tp 2`` (with a multiplication sign); empty for a single rank."""
    return f" {_BY} ".join(f"{axis} {size}" for axis, size in stage.mesh.axes if size > 1)


class _Scale:
    """The axis of the layers: embedding, layers, head, from left to right."""

    def __init__(self, plan: Plan) -> None:
        self._num_layers = plan.num_layers
        self._end = max(0.6, 0.06 * plan.num_layers)  # the embedding's and the head's part
        whole = plan.num_layers + 2 * self._end
        narrowest = min(max(1, high - low) for low, high in (s.layers for *_, s in plan.stages()))
        self.width = WIDTH * min(max(1.0, _ROOM * whole / (WIDTH * narrowest)), _WIDEST)
        self._unit = self.width / whole

    def span(self, pipeline: PipelinePlan, number: int) -> tuple[float, float]:
        """Left edge and width of a stage."""
        stage, whole = pipeline.stages[number], pipeline.stages[-1].head_rows
        if stage.head_rows and whole:
            low, high = (self._end * row / whole[1] * self._unit for row in stage.head_rows)
            return self.width - self._end * self._unit + low, high - low
        left = 0.0 if number == 0 else (self._end + stage.layers[0]) * self._unit
        is_last = pipeline.computes(number, "head")
        right = self.width if is_last else (self._end + stage.layers[1]) * self._unit
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
        yield self.width - self._end / 2 * self._unit, self._end_label("head", "head", "H")

    def _end_label(self, *texts: str) -> str:
        return _fitting(self._end * self._unit, texts)


class _Drawing:
    """What all lanes of a picture share."""

    def __init__(self, plan: Plan, chips: Mapping[int, Chip]) -> None:
        self.plan, self.chips, self.scale = plan, chips, _Scale(plan)
        kinds = list(dict.fromkeys(self.kind(stage) for _, _, stage in plan.stages()))
        vendors = list(dict.fromkeys(kind.vendor or kind.name for kind in kinds))
        self.looks: dict[Kind, str] = {}
        for kind in kinds:
            of_it = [k for k in self.looks if kind.vendor and k.vendor == kind.vendor]
            vendor = vendors.index(kind.vendor or kind.name) % _COLOURS
            self.looks[kind] = f"vendor-{vendor} shade-{len(of_it) % _SHADES}"

    def kind(self, stage: StagePlan) -> Kind:
        chip = self.chips.get(stage.mesh.ranks[0])
        return Kind(stage.device) if chip is None else Kind(chip.name, chip.vendor)

    def lane(self, group: PipelineGroup, y: float) -> Lane:
        pipeline, several = group.pipelines[0], len(group.pipelines)
        share = group.samples / self.plan.global_batch if self.plan.global_batch else 0.0
        width, cuts = share * self.scale.width, pipeline.num_microbatches * several
        ticks = [width * cut / cuts for cut in range(1, cuts)] if cuts and width / cuts >= 6 else []
        boxes, forms = [], []
        for number, stage in enumerate(pipeline.stages):
            ends = {"is_first": number == 0, "is_last": pipeline.computes(number, "head")}
            left, span = self.scale.span(pipeline, number)
            kind, headings = self.kind(stage), _headings(number, stage, **ends)
            forms.append((headings, *_details(stage, kind, folded=several > 1)))
            boxes.append(
                StageBox(
                    x=left + 1,
                    y=y + _STAGE_TOP,
                    width=max(2.0, span - 2),
                    height=_STAGE_HEIGHT,
                    look=self.looks[kind],
                    tooltip=f"{headings[0]}; {_in_full(stage, kind, folded=several > 1)}",
                )
            )
        rooms = [box.width - 2 * _padding(box.width) for box in boxes]
        headings, chips, *others = zip(*forms, strict=True)
        fullest = [_fitting(room, texts) for room, texts in zip(rooms, chips, strict=True)]
        alike = (_same_form(rooms, texts) for texts in (headings, *others))
        lines = ((h, chip, *more) for chip, h, *more in zip(fullest, *alike, strict=True))
        return Lane(
            y=y,
            heading=_lane_heading(group, self.plan, share),
            share_width=width,
            ticks=tuple(ticks),
            stages=tuple(replace(box, lines=text) for box, text in zip(boxes, lines, strict=True)),
        )


def _lane_heading(group: PipelineGroup, plan: Plan, share: float) -> str:
    pipeline, several = group.pipelines[0], len(group.pipelines)
    parts = [f"Pipeline {group.name}" if several == 1 else f"Pipelines {group.name}, all equal"]
    each = "" if several == 1 else " each"
    parts.append(f"{group.samples:,} of {plan.global_batch:,} samples a step ({share:.0%})")
    microbatches = _count(pipeline.num_microbatches, "micro-batch", "micro-batches")
    parts.append(f"{microbatches} of {pipeline.microbatch:,}{each}")
    parts += [f"schedule {pipeline.order}"] if pipeline.order else []
    return " · ".join(parts)


def _padding(width: float) -> float:
    """Between an edge of a stage that is so wide and its text."""
    return min(_PADDING, width / 12)


def _headings(number: int, stage: StagePlan, *, is_first: bool, is_last: bool) -> tuple[str, ...]:
    """What a stage may be called, from the fullest form to the shortest."""
    words = layers_in_words(stage, is_first=is_first, is_last=is_last)
    short = ", ".join(layers_held(stage.layers)) if stage.blocks else ""
    return f"stage {number}: {words}", words, f"layers {short}", short


def _in_full(stage: StagePlan, kind: Kind, *, folded: bool) -> str:
    """Everything about a stage but its layers."""
    who = _who(stage, folded=folded)
    chip = f"{kind.name} {stage.precision}"
    zero = [f"ZeRO {stage.zero}"] * bool(stage.zero)
    return " · ".join(filter(None, [who, mesh_in_words(stage), chip, *zero, *_settings(stage)]))


def _who(stage: StagePlan, *, folded: bool) -> str:
    ranks = stage.mesh.ranks
    one_by_one = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    return f"{_count(len(ranks), 'rank')} each" if folded else one_by_one


def _settings(stage: StagePlan) -> list[str]:
    found = [f"{stage.passes} passes"] * (stage.passes > 1)
    found += [f"{stage.pieces} pieces"] * (stage.pieces > 1)
    found += [f"{stage.expert_pieces} pieces to experts"] * (stage.expert_pieces > 1)
    found += elsewhere(stage)
    unlike = [(f"{entry.divides}s", stage.mesh.shares(entry.name)) for entry in UNLIKE]
    for words, shares in (("samples", stage.sample_shares), *unlike, ("state", stage.state_shares)):
        found += [f"{words} {':'.join(map(str, shares))}"] * bool(shares)
    return found + in_short(stage.recompute) + ["compiled"] * stage.compile


def _details(stage: StagePlan, kind: Kind, *, folded: bool) -> Iterator[tuple[str, ...]]:
    """Of each line of a box but the first: what it may say, from the fullest form to the
    shortest."""
    many = f"{len(stage.mesh.ranks)} {_BY} "
    first, _, rest = kind.name.partition("-")
    short = first if any(map(str.isdigit, first)) else f"{first}-{rest.partition('-')[0]}"
    names = (kind.words, kind.name, short.rstrip("-"))
    yield *(many + name for name in names), *names[1:]
    sizes = {axis: stage.mesh.size(axis) for axis in NAMES}
    told = {axis: size for axis, size in sizes.items() if size > 1 or axis in TOLD}
    mesh = " ".join(f"{axis} {size}" for axis, size in told.items())
    close = " ".join(f"{axis}{size}" for axis, size in told.items())
    yield f"{mesh} · ZeRO {stage.zero}", f"{close} z{stage.zero}"
    who = _who(stage, folded=folded)
    yield who, who.partition(" ")[2]
    yield " · ".join([stage.precision, *_settings(stage)]), stage.precision


def _same_form(rooms: Sequence[float], forms: Sequence[tuple[str, ...]]) -> list[str]:
    """The fullest form that fits every stage of a lane; where none does, what fits each."""
    for same in zip(*forms, strict=True):
        if all(map(_fits, rooms, same)):
            return list(same)
    return [_fitting(room, texts) for room, texts in zip(rooms, forms, strict=True)]


def _looks(pipeline: PipelinePlan) -> PipelinePlan:
    """The pipeline with its ranks counted from 0 in every stage."""
    stages = tuple(
        replace(stage, mesh=replace(stage.mesh, ranks=tuple(range(len(stage.mesh.ranks)))))
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def _fits(width: float, text: str) -> bool:
    return len(text) * _CHARACTER <= width


def _fitting(width: float, texts: Sequence[str]) -> str:
    """The first text that fits into ``width``; empty if none does."""
    return next((text for text in texts if _fits(width, text)), "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
