"""The page of a mix: what was measured, and timelines of the parts' plans and the mix's.

Times of stages follow from the measured rate of each kind alone and what its layers cost; links
are drawn as if they cost nothing. Where the measured mix is slower than its timeline, they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from weft.lab.cores import part
from weft.lab.mix import MixReport, in_rows
from weft.lab.mix_plans import Kind, Work
from weft.plan.plan import PipelinePlan, Plan
from weft.simulate.picture import to_svg
from weft.simulate.play import simulate_plan
from weft.simulate.timeline import Timeline
from weft.simulate.times import SeamTimes, StageTimes


def timelines(plan: Plan, rates: Mapping[int, float], work: Work) -> list[Timeline]:
    """One for each pipeline. ``rates``: tokens per second of the whole model on a rank's chip."""
    found = []
    for pipeline in plan.pipelines:
        stages = [_times(pipeline, s, rates, work) for s in range(len(pipeline.stages))]
        found.append(simulate_plan(pipeline, stages, [SeamTimes()] * (len(stages) - 1)))
    return found


def _times(
    pipeline: PipelinePlan, stage: int, rates: Mapping[int, float], work: Work
) -> StageTimes:
    """Backward costs twice the forward, in equal halves; recomputing, one more forward."""
    plan = pipeline.stages[stage]
    layers = plan.layers[1] - plan.layers[0]
    last = len(pipeline.stages) - 1
    piece = part(work.spec, work.seq_len, layers, embeds=stage == 0, predicts=stage == last)
    speed = sum(rates[rank] for rank in plan.mesh.ranks)
    third = pipeline.microbatch * work.seq_len * piece / speed / 3
    again = third if plan.recompute == "full" else 0.0
    return StageTimes(forward_s=third, input_grad_s=third + again, weight_grad_s=third)


def page(report: MixReport, kinds: Sequence[Kind], work: Work) -> str:
    """One self-contained HTML page."""
    rates = {
        rank: report.parts[kind.name].middle / len(kind.ranks)
        for kind in kinds
        for rank in kind.ranks
    }
    sections = []
    for kind in kinds:
        own = {n: rates[rank] for n, rank in enumerate(kind.ranks)}
        best = report.parts[kind.name].trial
        sections.append(_section(f"{kind.name} alone: {best.name}", best.plan, own, work))
    for title, mix in (("pooled", report.pooled), ("best mix", report.best)):
        sections.append(_section(f"{title}: {mix.trial.name}", mix.trial.plan, rates, work))
    rows = in_rows(report)
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            "<title>What mixing costs</title><style>",
            "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em}",
            "td,th{padding:.2em .8em;text-align:left}svg{max-width:100%;height:auto}",
            "</style></head><body><h1>What mixing costs</h1>",
            f"<p>Efficiency {report.efficiency:.3f}: {report.best.middle:.0f} of "
            f"{report.upper:.0f} tokens/s.</p><table><tr>{head}</tr>{body}</table>",
            *(f"<p>{escape(reason)}.</p>" for reason in report.reasons),
            "<p>Timelines of one step, from measured rates, with links that cost nothing. "
            "F forward, B backward, I and W its halves.</p>",
            *sections,
            "</body></html>",
        ]
    )


def _section(title: str, plan: Plan, rates: Mapping[int, float], work: Work) -> str:
    lines = timelines(plan, rates, work)
    longest = max(line.step_s for line in lines)
    pictures = "".join(
        f'<div style="width:{100 * line.step_s / longest:.1f}%">{to_svg(line)}</div>'
        for line in lines
    )
    tokens = plan.global_batch * work.seq_len
    return f"<h2>{escape(title)}</h2><p>{tokens / longest:.0f} tokens/s at most</p>{pictures}"
