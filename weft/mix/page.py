"""The page of a mix: what it reached, where that comes from, and one step of every plan in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from weft.mix.chips import Kind
from weft.mix.mix import MixReport, Rates, in_rows, uncertainty
from weft.mix.questions import NAMES
from weft.plan.plan import PipelinePlan
from weft.report.html import Table, Tile, render
from weft.report.svg import Axis, Bar, Row, Scale, fill_legend, row_chart
from weft.report.timelines import TIME, phase_legend, timeline_rows

_NUMBERS = ("tokens/s", "+-", "of sum", "over the fastest part")
_LOOKS = {"part": "fill-8", "mix": "fill-0", "best": "fill-1"}
_RATE = Axis("throughput", "tokens/s")


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """A plan that was measured, and one step of it in modelled time."""

    title: str
    rates: Rates
    ranks: Sequence[int]
    """Of the cluster, for each rank of the plan."""
    names: Mapping[int, str]
    """Rank of the cluster -> its kind of chip."""

    @property
    def step_s(self) -> float:
        return max(line.step_s for line in self.rates.timelines)

    def drawn(self, longest: float) -> Markup:
        """A step of each pipeline, and who computes what; one of ``longest`` has all the width."""
        both = zip(self.rates.trial.plan.pipelines, self.rates.timelines, strict=True)
        rows = [
            row
            for pipeline, line in both
            for row in timeline_rows(line, list(self._labels(pipeline)), line.step_s)
        ]
        return row_chart(rows, TIME, longest)

    def _labels(self, pipeline: PipelinePlan) -> Iterator[str]:
        """Of each position: who computes which layers there, of how much."""
        for stages in pipeline.positions():
            here = [self.ranks[rank] for rank in pipeline.stages[stages[0]].mesh.ranks]
            held = [pipeline.stages[stage].layers for stage in stages]
            layers = sum(end - first for first, end in held)
            yield (
                f"rank{'s' * (len(here) > 1)} {', '.join(map(str, here))} {self.names[here[0]]}: "
                f"{layers:g} of {self.rates.trial.plan.num_layers} layers, "
                f"{pipeline.samples} samples"
            )


def page(report: MixReport, kinds: Sequence[Kind]) -> str:
    """One self-contained HTML page."""
    names = {rank: kind.name for kind in kinds for rank in kind.ranks}
    best: dict[str, Rates] = {}
    for rates in sorted(report.mixes, key=lambda rates: (not rates.is_final, -rates.middle)):
        if rates.values:
            best.setdefault(rates.trial.generation, rates)
    alone = [
        _Picture(
            title=f"{kind.name}: {rates.trial.name}", rates=rates, ranks=kind.ranks, names=names
        )
        for kind in kinds
        for rates in [report.parts[kind.name]]
    ]
    mixes = [
        _Picture(title=rates.trial.name, rates=rates, ranks=range(len(names)), names=names)
        for rates in best.values()
    ]
    longest = max(picture.step_s for picture in [*alone, *mixes])
    looks = [(_LOOKS["part"], "a part alone"), (_LOOKS["mix"], "all together")]
    keys = [*looks, (_LOOKS["best"], "the best mix"), ("limit", "sum of the parts")]
    return render(
        "mix.html.j2",
        title="What mixing costs",
        kind="mix",
        report=report,
        tiles=list(_tiles(report)),
        rates=row_chart(_rate_rows(report, best.values()), _RATE, 1.02 * _largest(report)),
        rate_legend=fill_legend(keys),
        generations=_table("Generations", [_generation_row(r, report) for r in best.values()]),
        trials=_table("Everything that was measured", in_rows(report)),
        longest=longest,
        pictures={"The parts alone": alone, "All together": mixes},
        phases=phase_legend(),
    )


def _tiles(report: MixReport) -> Iterator[Tile]:
    within = uncertainty(report.efficiencies)
    about = "" if within is None else f" \N{PLUS-MINUS SIGN} {within:.3f}"
    yield Tile("Efficiency", f"{report.efficiency:.3f}{about}", "the best mix over the sum")
    yield Tile("Best mix", f"{report.best.middle:,.0f}", f"tokens/s: {report.best.trial.name}")
    yield Tile("Sum of the parts", f"{report.upper:,.0f}", "tokens/s, the upper bound")
    yield Tile("Fastest part alone", f"{report.lower:,.0f}", "tokens/s, the lower bound")


def _largest(report: MixReport) -> float:
    """Of all rates."""
    return max(report.upper, *(rates.middle for rates in report.mixes))


def _rate_rows(report: MixReport, mixes: Iterable[Rates]) -> Iterator[Row]:
    scale = Scale.of(_largest(report), _RATE.unit)
    parts = [("part", f"{name} alone", rates) for name, rates in report.parts.items()]
    both = [("best" if r is report.best else "mix", r.trial.name, r) for r in mixes]
    for look, name, rates in [*parts, *both]:
        text = scale.text(rates.middle)
        bar = Bar(0.0, rates.middle, _LOOKS[look], text, f"{text} {_RATE.unit}")
        yield Row(name, [bar], report.upper)


def _table(caption: str, rows: Sequence[Mapping[str, str]]) -> Table:
    headers = tuple(dict.fromkeys(name for row in rows for name in row))
    cells = [tuple(row.get(name, "") for name in headers) for row in rows]
    return Table(caption=caption, headers=headers, rows=cells, numeric=_NUMBERS)


def _generation_row(rates: Rates, report: MixReport) -> dict[str, str]:
    within = uncertainty(rates.values)
    return {
        "generation": NAMES.get(rates.trial.generation, ""),
        "plan": rates.trial.name,
        "tokens/s": f"{rates.middle:.0f}",
        "+-": "" if within is None else f"{within / rates.middle:.1%}",
        "of sum": f"{rates.middle / report.upper:.3f}",
        "over the fastest part": f"{rates.middle / report.lower:.3f}",
    }
