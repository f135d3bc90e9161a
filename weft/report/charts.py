"""The curves of a report: which, and with how few points they still say the same."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from statistics import fmean

from weft.report.metrics import EvalMetrics, StepMetrics
from weft.report.starts import starts
from weft.report.svg import Axis, Chart, Look, Scale, Series, ticks

MOST_POINTS = 1000
"""Points of a curve at most; a longer run shows one point for several steps."""
_FEWEST_TO_SMOOTH = 20

Combine = Callable[[Sequence[float]], float]
_LEVELS: tuple[Look, ...] = ("level-1", "level-2")


def charts(
    steps: Sequence[StepMetrics], evals: Sequence[EvalMetrics], baselines: Mapping[str, float]
) -> list[Chart]:
    """The charts that the records are enough for; none without a step."""
    if not steps:
        return []
    marks = [(start.first, "restart") for start in starts(steps)[1:]]
    found = [_loss(steps, evals, baselines), *_of_each_step(steps), *_of_work(steps)]
    found += _of_experts(steps)
    return [replace(chart, marks=marks) for chart in found]


def steps_per_point(num_steps: int) -> int:
    """How many steps one point of a curve stands for."""
    return max(1, math.ceil(num_steps / MOST_POINTS))


def thin(
    x: Sequence[int], y: Sequence[float], combine: Combine
) -> tuple[list[int], list[float | None]]:
    """At most ``MOST_POINTS`` points: each the last ``x`` of its steps and their combined ``y``."""
    each = steps_per_point(len(x))
    starts = range(0, len(x), each)
    parts = ([v for v in y[start : start + each] if math.isfinite(v)] for start in starts)
    ends = [x[min(start + each, len(x)) - 1] for start in starts]
    return ends, [combine(part) if part else None for part in parts]


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Each value's neighbours on both sides, weighted down by half every ``half_life`` steps.

    Looking both ways keeps the curve from lagging behind a loss that falls. What is not finite
    is left out.
    """
    keep = 0.5 ** (1 / half_life)

    def looking_back(numbers: Sequence[float]) -> list[float]:
        """Each number and those before it, decaying by ``keep`` a step."""
        return list(accumulate(numbers, lambda so_far, own: keep * so_far + own))

    def neighbours(own: Sequence[float]) -> list[float]:
        before, after = looking_back(own), looking_back(own[::-1])[::-1]
        return [b + a - o for b, a, o in zip(before, after, own, strict=True)]

    sums = neighbours([v if math.isfinite(v) else 0.0 for v in values])
    weights = neighbours([float(math.isfinite(v)) for v in values])
    return [s / weight if weight else math.nan for s, weight in zip(sums, weights, strict=True)]


def _loss(
    steps: Sequence[StepMetrics], evals: Sequence[EvalMetrics], baselines: Mapping[str, float]
) -> Chart:
    at, losses = [m.step for m in steps], [m.loss for m in steps]
    smooths = len(steps) >= _FEWEST_TO_SMOOTH
    x, y = thin(at, losses, fmean)
    series = [Series(label="training", x=x, y=y, look="faint" if smooths else "main")]
    if smooths:
        smoothed = smooth(losses, half_life=max(2.0, len(steps) / 100))
        x, y = thin(at, smoothed, fmean)
        series.append(Series(label="training, smoothed", x=x, y=y))
    held_out = [e for e in evals if math.isfinite(e.eval_loss)]
    if held_out:
        x, y = thin([e.step for e in held_out], [e.eval_loss for e in held_out], fmean)
        series.append(Series(label="held-out", x=x, y=y, look="points"))
    edges = sorted({min(at), max(at)})
    series += [
        Series(label=f"{name} baseline", x=edges, y=[loss] * len(edges), look=look)
        for look, (name, loss) in zip(cycle(_LEVELS), baselines.items(), strict=False)
    ]
    words = [_in_words("training", at, losses)]
    words += [f"held-out {e.eval_loss:.4g} at step {e.step}" for e in held_out[-1:]]
    words += [f"{name} baseline {loss:.4g}" for name, loss in baselines.items()]
    return Chart(
        id="loss",
        title="Loss",
        series=series,
        description="; ".join(words) + ".",
        y=Axis("loss", "nats per token"),
        top=_token_axis(steps),
        top_title="tokens",
        height=300,
    )


def _token_axis(steps: Sequence[StepMetrics]) -> list[tuple[float, str]]:
    """Round numbers of tokens, each at the step that reached it."""
    passed = list(accumulate(m.tokens for m in steps))
    if passed[-1] <= 0:
        return []
    scale, spread = Scale.of(passed[-1], "tokens"), (steps[0].step, steps[-1].step)
    places = ((tokens, bisect_left(passed, tokens)) for tokens in ticks(0, passed[-1])[1:])
    found = [(float(steps[at].step), scale.text(t)) for t, at in places if at < len(steps)]
    return found if spread[0] < spread[1] else []


def _of_each_step(steps: Sequence[StepMetrics]) -> Iterator[Chart]:
    """Charts of one number of every step."""
    at = [m.step for m in steps]
    rate, lr = [m.tokens_per_s for m in steps], [m.lr for m in steps]
    norm, memory = [m.grad_norm for m in steps], [m.memory_gib for m in steps]
    curves: tuple[tuple[str, str, Axis, list[float], Combine], ...] = (
        ("throughput", "Throughput", Axis("throughput", "tokens/s"), rate, fmean),
        ("lr", "Learning rate", Axis("learning rate"), lr, fmean),
        ("grad-norm", "Gradient norm", Axis("L2 norm before clipping"), norm, max),
        ("memory", "Memory", Axis("most of any rank", "GiB"), memory, max),
    )
    for name, title, axis, values, combine in curves:
        x, y = thin(at, values, combine)
        series = [Series(label=title.lower(), x=x, y=y)]
        words = _in_words(title.lower(), at, values) + "."
        yield Chart(id=name, title=title, series=series, description=words, y=axis, from_zero=True)


def _of_work(steps: Sequence[StepMetrics]) -> Iterator[Chart]:
    """How unequal ranks' work was, where samples were given out by it."""
    known = [step for step in steps if step.imbalance is not None]
    if not known:
        return
    at, nothing = [step.step for step in known], math.nan
    now = [nothing if m.imbalance is None else m.imbalance for m in known]
    before = [nothing if m.imbalance_in_order is None else m.imbalance_in_order for m in known]
    x, y = thin(at, now, fmean)
    series = [Series(label="as samples were given out", x=x, y=y)]
    x, y = thin(at, before, fmean)
    series.append(Series(label="in their order", x=x, y=y, look="faint"))
    words = [_in_words(each.label, at, of) for each, of in zip(series, (now, before), strict=True)]
    axis, title = Axis("most work of a rank, over the mean"), "Imbalance of work"
    yield Chart(id="work", title=title, series=series, description="; ".join(words) + ".", y=axis)


def _of_experts(steps: Sequence[StepMetrics]) -> Iterator[Chart]:
    """How unequal the loads of experts were, where there are any."""
    known = [(m.step, m.expert_imbalance) for m in steps if m.expert_imbalance is not None]
    if not known:
        return
    at, loads = [step for step, _ in known], [load for _, load in known]
    x, y = thin(at, loads, max)
    axis = Axis("most tokens of an expert, over the mean")
    title = "Imbalance of experts"
    series = [Series(label=title.lower(), x=x, y=y)]
    words = _in_words(title.lower(), at, loads) + ", in the layer where it is largest."
    yield Chart(id="experts", title=title, series=series, description=words, y=axis)


def _in_words(label: str, at: Sequence[int], values: Sequence[float]) -> str:
    known = [(step, v) for step, v in zip(at, values, strict=True) if math.isfinite(v)]
    if not known:
        return f"{label}: no finite number"
    (first, start), (last, end) = known[0], known[-1]
    low, high = min(v for _, v in known), max(v for _, v in known)
    return (
        f"{label} {start:.4g} at step {first}, {end:.4g} at step {last}, "
        f"lowest {low:.4g}, highest {high:.4g}"
    )
