"""The page of a mix: what it reached, where that comes from, and one step of every plan in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weft.mix.chips import Kind
from weft.mix.mix import MixReport, Rates, in_rows, uncertainty
from weft.mix.questions import NAMES
from weft.plan.plan import PipelinePlan, Plan
from weft.simulate.picture import COLOURS, ROW_HEIGHT, to_svg

_WIDTH = 620
"""Of the longest step, in units of the page."""
_STYLE = f"""
body{{font:15px system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em}}
table{{border-collapse:collapse}} td,th{{padding:.2em .8em .2em 0;text-align:left}}
td.number,th.number{{text-align:right;font-variant-numeric:tabular-nums}}
.line{{display:flex;gap:10px;margin:4px 0;overflow-x:auto}} svg{{flex:none}}
.ranks{{flex:none;width:260px;font-size:13px;line-height:{ROW_HEIGHT}px;white-space:nowrap;
overflow:hidden;text-overflow:ellipsis}} .key{{padding:0 .5em;margin-right:.5em;color:white}}
h2{{margin-top:1.6em}} h3{{margin-bottom:.2em}} p.small{{margin:.2em 0;font-size:13px}}
"""
_NUMBERS = ("tokens/s", "+-", "of sum", "over the fastest part")
_PHASES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """A plan that was measured, and one step of it in modelled time."""

    title: str
    rates: Rates
    ranks: Sequence[int]
    """Of the cluster, for each rank of the plan."""

    @property
    def step_s(self) -> float:
        return max(line.step_s for line in self.rates.timelines)


def page(report: MixReport, kinds: Sequence[Kind]) -> str:
    """One self-contained HTML page."""
    alone, mixes = _pictures(report, kinds)
    longest = max(picture.step_s for picture in [*alone, *mixes])
    names = {rank: kind.name for kind in kinds for rank in kind.ranks}
    keys = (
        f'<span class="key" style="background:{COLOURS[kind]}">{kind}</span>{what} '
        for kind, what in _PHASES.items()
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>What mixing costs</title><style>{_STYLE}</style></head><body>",
            "<h1>What mixing costs</h1>",
            *_result(report),
            "<h2>Generations</h2>",
            _table(_generation_rows(report)),
            "<h2>One step</h2>",
            f"<p>All on one scale: the longest takes {longest:.3g} s. Drawn as the planner "
            "predicts it from the measured rate of each kind alone, as if waiting for gradients "
            "and the update cost nothing; beside it what was measured.</p>",
            f"<p>{''.join(keys)}</p>",
            "<h3>The parts alone</h3>",
            *(_section(picture, names, longest) for picture in alone),
            "<h3>All together</h3>",
            *(_section(picture, names, longest) for picture in mixes),
            "<h2>Everything that was measured</h2>",
            _table(in_rows(report)),
            "</body></html>",
        ]
    )


def _pictures(report: MixReport, kinds: Sequence[Kind]) -> tuple[list[_Picture], list[_Picture]]:
    """Of the parts, and of the best plan of each generation, the best of all first."""
    alone = [
        _Picture(title=f"{kind.name}: {rates.trial.name}", rates=rates, ranks=kind.ranks)
        for kind in kinds
        for rates in [report.parts[kind.name]]
    ]
    everyone = range(sum(len(kind.ranks) for kind in kinds))
    return alone, [
        _Picture(title=rates.trial.name, rates=rates, ranks=everyone)
        for rates in _generations(report)
    ]


def _generations(report: MixReport) -> list[Rates]:
    """The best of each, fastest first."""
    found: dict[str, Rates] = {}
    for rates in sorted(report.mixes, key=lambda rates: (rates.is_final, rates.middle)):
        if rates.values:
            found[rates.trial.generation] = rates
    return sorted(found.values(), key=lambda rates: (not rates.is_final, -rates.middle))


def _result(report: MixReport) -> list[str]:
    within = uncertainty(report.efficiencies)
    sure = "" if within is None else f" &plusmn; {within:.3f}"
    parts = " + ".join(f"{escape(name)} {r.middle:.0f}" for name, r in report.parts.items())
    found = [
        f"<p><b>Efficiency {report.efficiency:.3f}{sure}</b>: the best mix, "
        f"{escape(report.best.trial.name)}, does {report.best.middle:.0f} of the "
        f"{report.upper:.0f} tokens/s that the parts alone add up to ({parts}). The fastest part "
        f"alone, the lower bound, does {report.lower:.0f}.</p>"
    ]
    if report.pooling_gain is None or report.replanning_gain is None:
        found.append("<p>The parts' own plans do not run side by side, so what pooling gains "
                     "cannot be told from what planning anew gains.</p>")  # fmt: skip
    else:
        found.append(
            f"<p><b>Pooling &times; {report.pooling_gain:.3f}</b>: the parts' own plans side by "
            "side, each with its share of the batch, over the fastest part alone. "
            f"<b>Re-planning &times; {report.replanning_gain:.3f}</b>: the best plan for all chips "
            "together over that.</p>"
        )
    return found + [f"<p>Unlike work: {escape(reason)}.</p>" for reason in report.reasons]


def _generation_rows(report: MixReport) -> list[dict[str, str]]:
    rows = []
    for rates in _generations(report):
        within = uncertainty(rates.values)
        rows.append(
            {
                "generation": NAMES.get(rates.trial.generation, ""),
                "plan": rates.trial.name,
                "tokens/s": f"{rates.middle:.0f}",
                "+-": "" if within is None else f"{within / rates.middle:.1%}",
                "of sum": f"{rates.middle / report.upper:.3f}",
                "over the fastest part": f"{rates.middle / report.lower:.3f}",
            }
        )
    return rows


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    def cells(tag: str, values: Iterable[tuple[str, str]]) -> str:
        return "".join(
            f"<{tag}{' class=number' if name in _NUMBERS else ''}>{escape(text)}</{tag}>"
            for name, text in values
        )

    head = cells("th", ((name, name) for name in rows[0]))
    body = "".join(f"<tr>{cells('td', row.items())}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _section(picture: _Picture, names: Mapping[int, str], longest: float) -> str:
    plan, measured = picture.rates.trial.plan, picture.rates.step_s
    lines = "".join(
        f'<div class="line"><div class="ranks">{_seats(pipeline, plan, picture.ranks, names)}'
        f"</div>{to_svg(line, max(1, round(_WIDTH * line.step_s / longest)))}</div>"
        for pipeline, line in zip(plan.pipelines, picture.rates.timelines, strict=True)
    )
    return (
        f"<p><b>{escape(picture.title)}</b>: measured {measured:.3g} s a step, "
        f"drawn {picture.step_s:.3g}</p>{lines}"
    )


def _seats(
    pipeline: PipelinePlan, plan: Plan, ranks: Sequence[int], names: Mapping[int, str]
) -> str:
    """A line for each position: who computes which layers there, of how much."""
    found = []
    for stages in pipeline.positions():
        here = [ranks[rank] for rank in pipeline.stages[stages[0]].mesh.ranks]
        who = f"rank{'s' * (len(here) > 1)} {', '.join(map(str, here))} {names[here[0]]}"
        held = [pipeline.stages[stage].layers for stage in stages]
        layers = sum(end - first for first, end in held)
        what = f"{layers} of {plan.num_layers} layers, {pipeline.samples} samples"
        found.append(f'<div title="{escape(what)}">{escape(who)}: {escape(what)}</div>')
    return "".join(found)
