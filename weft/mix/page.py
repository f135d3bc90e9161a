"""The page of a mix: what it reached, where that comes from, and one step of every plan in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from weft.mix.chips import Kind
from weft.mix.mix import MixReport, Rates, in_rows, uncertainty
from weft.mix.questions import NAMES
from weft.plan.plan import PipelinePlan
from weft.report.html import render
from weft.simulate.picture import COLOURS, ROW_HEIGHT, to_svg

_WIDTH = 620
"""Of the longest step, in units of the page."""
_NUMBERS = ("tokens/s", "+-", "of sum", "over the fastest part")
_PHASES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


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

    def lines(self, longest: float) -> Iterator[tuple[list[tuple[str, str]], Markup]]:
        """Of each pipeline: who computes what, and a step; one of ``longest`` has all the width."""
        pipelines = self.rates.trial.plan.pipelines
        for pipeline, line in zip(pipelines, self.rates.timelines, strict=True):
            width = max(1, round(_WIDTH * line.step_s / longest))
            yield list(self._seats(pipeline)), Markup(to_svg(line, width))

    def _seats(self, pipeline: PipelinePlan) -> Iterator[tuple[str, str]]:
        """Of each position: who computes which layers there, of how much."""
        for stages in pipeline.positions():
            here = [self.ranks[rank] for rank in pipeline.stages[stages[0]].mesh.ranks]
            held = [pipeline.stages[stage].layers for stage in stages]
            layers = sum(end - first for first, end in held)
            yield (
                f"rank{'s' * (len(here) > 1)} {', '.join(map(str, here))} {self.names[here[0]]}",
                f"{layers} of {self.rates.trial.plan.num_layers} layers, "
                f"{pipeline.samples} samples",
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
    return render(
        "mix.html.j2",
        report=report,
        within=uncertainty(report.efficiencies),
        generations=[_generation_row(rates, report) for rates in best.values()],
        trials=in_rows(report),
        numeric=_NUMBERS,
        longest=max(picture.step_s for picture in [*alone, *mixes]),
        pictures={"The parts alone": alone, "All together": mixes},
        phases=_PHASES,
        colours=COLOURS,
        row_height=ROW_HEIGHT,
    )


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
