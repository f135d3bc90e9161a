"""``report.html``: one page about a run.

Built from the files of the run's folder alone, so it can be written again at any time, also for a
run that crashed: what is not there is called "not recorded". All text of a run is untrusted; the
page escapes it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TypeVar

from markupsafe import Markup

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigError, show
from weft.config.tree import DEFAULT
from weft.plan.plan import Plan
from weft.planner.naming import elsewhere
from weft.recompute.asked import in_short
from weft.report.charts import charts, steps_per_point
from weft.report.events import EVENTS_FILE
from weft.report.experts_part import experts_part
from weft.report.goodput_part import goodput_part
from weft.report.html import NOT_RECORDED, Tile, render
from weft.report.metrics import EvalMetrics, StepMetrics, perplexity, replace_text
from weft.report.plan_picture import (
    Picture,
    chips_of,
    layers_in_words,
    mesh_in_words,
    picture,
    pipeline_groups,
    ranges,
)
from weft.report.prediction_rows import HEADERS, prediction_note, prediction_rows
from weft.report.profile_part import profile_part
from weft.report.run_files import UNREADABLE, RunFiles, flat, number, read_run, reason
from weft.report.starts import starts
from weft.report.svg import Chart, line_chart
from weft.report.units import count, duration, flop_rate, gib, percent_or_na

T = TypeVar("T")
Rows = Sequence[tuple[str, ...]]
"""Of a table, whose heading is in the template."""

_WARM_UP_STEPS = 2
_ROWS = 10
_MOST_RANGES = 3
_RUN_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "summary.json")


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run folder, whatever of a run the folder holds.

    Raises:
        ConfigError: ``run`` is not the folder of a run.
        OSError: the page cannot be written.
    """
    if not any((run / name).is_file() for name in _RUN_FILES):
        hint = f"It holds none of {', '.join(_RUN_FILES)}."
        raise ConfigError("run", str(run), "the folder of a run", hint)
    page = run / "report.html"
    replace_text(page, _render(read_run(run)))
    return page


def _render(run: RunFiles) -> str:
    problems = list(run.problems)

    def attempt(name: str, show_it: Callable[[], T | None]) -> T | None:
        """A part made from a file that was read and may still hold nonsense."""
        try:
            return show_it()
        except UNREADABLE as error:
            problems.append(f"{name}: {reason(error, run.folder)}")
            return None

    loss, bits = _held_out(run)
    baselines = _baselines(run)
    curves = attempt("metrics.jsonl", lambda: _charts(run, baselines))
    return render(
        "report.html.j2",
        kind="report",
        title=str(run.config.get("name") or run.folder.resolve().name),
        subtitle=_subtitle(run),
        status=_status(run),
        tiles_of_run=_tiles(run, loss, bits),
        verdict=_verdict(loss, baselines),
        results=_results(run, loss, bits, baselines),
        charts=curves or [],
        starts=_starts(run),
        goodput=attempt(EVENTS_FILE, lambda: goodput_part(run.events, run.steps, run.summary)),
        steps_per_point=steps_per_point(len(run.steps)),
        numbers=_numbers(run.steps, run.evals),
        num_steps=len({m.step for m in run.steps}),
        plan=attempt("plan.json", lambda: run.plan and (_picture(run), _stages(run.plan))),
        prediction_headers=HEADERS,
        prediction=prediction_rows(run.summary),
        prediction_note=prediction_note(run.summary),
        experts=attempt("metrics.jsonl", lambda: experts_part(run.steps)),
        profile=attempt("profile", lambda: run.profile and profile_part(run.profile)),
        samples=_samples(run),
        samples_step=number(run.summary, "step"),
        settings=_settings(run),
        machines=attempt("cluster.json", lambda: run.cluster and _machines(run.cluster)),
        environment=_environment(run),
        checkpoints=_checkpoints(run),
        problems=problems,
    )


def _charts(run: RunFiles, baselines: Mapping[str, float]) -> list[tuple[Chart, Markup]]:
    return [(chart, line_chart(chart)) for chart in charts(run.steps, run.evals, baselines)]


def _picture(run: RunFiles) -> Picture:
    assert run.plan is not None
    return picture(run.plan, chips_of(run.plan, run.cluster))


def _starts(run: RunFiles) -> Rows:
    """Each start of the run; nothing where there was one."""
    found = starts(run.steps)
    return [
        (str(name), f"{s.first:,} to {s.last:,}", duration(s.seconds), count(s.tokens))
        for name, s in enumerate(found if len(found) > 1 else [], start=1)
    ]


def _subtitle(run: RunFiles) -> str:
    """What was trained on what."""
    family, size = run.config.get("model.family"), run.config.get("model.size")
    parameters = number(run.summary, "parameters")
    parts = [" ".join(str(name) for name in (family, size) if name)] if family else []
    parts += [] if parameters is None else [f"{count(parameters)} parameters"]
    parts += [f"trained on {run.config['data.path']}"] if run.config.get("data.path") else []
    parts += [_where(run.plan, run.cluster)] if run.plan else []
    return ", ".join(parts)


def _where(plan: Plan, cluster: Cluster | None) -> str:
    """``8 ranks on 2 machines``."""
    ranks, hosts = plan.world_size, [node.host for node in cluster.nodes] if cluster else []
    machines = f" on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}" if hosts else ""
    sites = f" in {len(plan.sites)} sites" if plan.sites else ""
    casts = f", borders cast to {' and '.join(plan.casts)}" if plan.casts else ""
    casts += "".join(f", tokens to experts cast to {cast}" for cast in plan.expert_casts)
    casts += f", sums between domains cast to {plan.sums}" if plan.sums else ""
    return f"{ranks:,} rank{'s' * (ranks != 1)}{machines}{sites}{casts}"


def _status(run: RunFiles) -> tuple[bool, str]:
    """Whether the run came to its end, and how far it came."""
    total = number(run.config, "train.steps")
    if not run.steps:
        return False, "no steps recorded"
    last = run.steps[-1].step
    of = f" of {int(total):,}" if total is not None else ""
    if total is not None and last >= total and run.summary:
        return True, f"finished: {last:,}{of} steps"
    if number(run.summary, "step") == last:
        return True, f"ended as asked after {last:,}{of} steps"
    return False, f"not finished: {last:,}{of} steps recorded"


def _baselines(run: RunFiles) -> dict[str, float]:
    """Name -> held-out loss, nats per token, the best first."""
    found = {name: number(run.summary, "baselines", name) for name in ("unigram", "bigram")}
    known = {name: loss for name, loss in found.items() if loss is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def _tiles(run: RunFiles, loss: float | None, bits: float | None) -> list[Tile]:
    steps = run.steps
    steady = steps[_WARM_UP_STEPS:] or steps
    speed = number(run.summary, "tokens_per_s") or _median([m.tokens_per_s for m in steady])
    mfu = number(run.summary, "mfu")
    if mfu is None:
        mfu = _median([m.mfu for m in steady if m.mfu is not None])
    memory = max((m.memory_gib for m in steps if math.isfinite(m.memory_gib)), default=None)
    known = number(run.summary, "parameters")
    return [
        Tile("Held-out loss", _fixed(loss, 4), "nats per token"),
        Tile("Perplexity", _perplexity(loss), "held-out"),
        Tile("Bits per byte", _fixed(bits, 3), "held-out"),
        Tile("Training loss", _fixed(steps[-1].loss if steps else None, 4), "last step"),
        Tile("Throughput", _fixed(speed, 0), "tokens per second"),
        Tile("MFU", percent_or_na(mfu), _mfu_reference(run)),
        Tile("Memory", _fixed(memory, 2), f"GiB, most of any rank{_limit(run)}"),
        Tile("Parameters", NOT_RECORDED if known is None else count(known)),
        _time(run),
    ]


def _limit(run: RunFiles) -> str:
    """Memory of the smallest chip, where the chips are known."""
    chips = chips_of(run.plan, run.cluster).values() if run.plan else ()
    return f", of {min(chip.memory_gib for chip in chips):g}" if chips else ""


def _time(run: RunFiles) -> Tile:
    """Of all starts together; the last one's is known better where the run ended."""
    found = starts(run.steps)
    each, wall_s = [start.seconds for start in found], number(run.summary, "wall_s")
    if wall_s is not None and (not found or number(run.summary, "step") == found[-1].last):
        each[-1:] = [wall_s]
    note = f"over {len(found)} starts" if len(found) > 1 else ""
    return Tile("Time", duration(sum(each)) if any(each) else NOT_RECORDED, note)


def _mfu_reference(run: RunFiles) -> str:
    """What MFU is a part of."""
    tflops = number(run.summary, "mfu_reference", "tflops")
    if tflops is None:
        tflops = next((m.peak_tflops for m in reversed(run.steps) if m.peak_tflops), None)
    known = run.summary.get("mfu_reference")
    basis = str(known.get("basis", "")) if isinstance(known, Mapping) else ""
    if tflops is None or not math.isfinite(tflops):
        return basis or "the chips' peak is not known"
    words = f"of {flop_rate(tflops * 1e12)}" + (f": {basis}" if basis else "")
    measured = run.summary.get("mfu_of_measured")
    if isinstance(measured, Mapping):
        mfu = percent_or_na(number(run.summary, "mfu_of_measured", "mfu"))
        words += f"; {mfu} of what was measured: {measured.get('basis', '')}"
    return words


def _held_out(run: RunFiles) -> tuple[float | None, float | None]:
    """The model's held-out loss in nats per token and in bits per byte."""
    loss = number(run.summary, "held_out", "loss")
    bits = number(run.summary, "held_out", "bits_per_byte")
    written = number(run.summary, "step")
    newer = [m for m in run.evals if loss is None or (written is not None and m.step > written)]
    if newer and math.isfinite(newer[-1].eval_loss):
        loss, bits = newer[-1].eval_loss, None
    return loss, _bits_per_byte(run, loss) if bits is None else bits


def _bits_per_byte(run: RunFiles, loss: float | None) -> float | None:
    tokens = number(run.summary, "held_out", "tokens")
    num_bytes = number(run.summary, "held_out", "bytes")
    if loss is None or tokens is None or not num_bytes:
        return None
    return loss * tokens / num_bytes / math.log(2)


def _results(
    run: RunFiles, loss: float | None, bits: float | None, baselines: Mapping[str, float]
) -> Rows:
    if loss is None:
        return []
    others = [(f"{name} baseline", x, _bits_per_byte(run, x)) for name, x in baselines.items()]
    return [
        (name, _fixed(nats, 4), _perplexity(nats), _fixed(per_byte, 3))
        for name, nats, per_byte in [("this model", loss, bits), *others]
    ]


def _verdict(loss: float | None, baselines: Mapping[str, float]) -> str:
    """How the model compares with the baselines."""
    if loss is None or not baselines:
        return ""
    differences = (
        f"{abs(base - loss):.2f} nats {'below' if loss < base else 'above'} the {name} baseline"
        for name, base in baselines.items()
    )
    return f"Held-out loss lies {' and '.join(differences)}."


def _numbers(steps: Sequence[StepMetrics], evals: Sequence[EvalMetrics]) -> Rows:
    """What the charts show, at a few steps: spread evenly, evaluations included, the last too."""
    by_step = {m.step: m for m in steps}
    held_out = {m.step: _fixed(m.eval_loss, 4) for m in evals}
    rows = []
    for step in sorted({*_spread(list(by_step)), *_spread(list(held_out))}):
        metrics = by_step.get(step)
        loss, *others = ("",) * 6 if metrics is None else _step_cells(metrics)
        rows.append((f"{step:,}", loss, held_out.get(step, ""), *others))
    return rows


def _step_cells(metrics: StepMetrics) -> tuple[str, ...]:
    return (
        _fixed(metrics.loss, 4),
        _digits(metrics.grad_norm, ".3g"),
        _digits(metrics.lr, ".2e"),
        _fixed(metrics.tokens_per_s, 0),
        percent_or_na(metrics.mfu),
        _fixed(metrics.memory_gib, 2),
    )


def _spread(steps: Sequence[int]) -> list[int]:
    """At most ten of the steps, evenly, the first and the last among them."""
    if len(steps) <= _ROWS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (_ROWS - 1))] for i in range(_ROWS)]


def _stages(plan: Plan) -> Rows:
    rows = []
    for group in pipeline_groups(plan):
        pipeline, share = group.pipelines[0], group.samples / max(1, plan.global_batch)
        for at, stage in enumerate(pipeline.stages):
            ends = {"is_first": at == 0, "is_last": pipeline.computes(at, "head")}
            extras = in_short(stage.recompute)
            extras += ["compiled"] * stage.compile
            extras += elsewhere(stage)
            rows.append(
                (
                    f"{group.name}, stage {at}",
                    f"{group.samples:,} ({share:.0%})",
                    f"{pipeline.num_microbatches:,} of {pipeline.microbatch:,}",
                    layers_in_words(stage, **ends),
                    _ranks([r for p in group.pipelines for r in p.stages[at].mesh.ranks]),
                    mesh_in_words(stage) or "one rank",
                    f"{stage.device} {stage.precision}",
                    ", ".join(extras) or "none",
                )
            )
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """Which ranks; for many scattered ones the first few and how many there are."""
    parts = ranges(sorted(ranks)).split(", ")
    if len(parts) <= _MOST_RANGES:
        return ", ".join(parts)
    return f"{', '.join(parts[:_MOST_RANGES])} and more, {len(ranks):,} in all"


def _samples(run: RunFiles) -> list[tuple[str, str]]:
    """(prompt, text that the model wrote after it)."""
    found = run.summary.get("samples")
    entries = found if isinstance(found, list) else []
    return [
        (str(entry.get("prompt", "")), str(entry.get("text", "")).rstrip())
        for entry in entries
        if isinstance(entry, Mapping)
    ]


def _settings(run: RunFiles) -> list[tuple[str, tuple[str, ...], Rows]]:
    """What was chosen, and what was left at its default. One table if that is not known."""
    rows: Rows = [
        (key, _value(value), run.origins.get(key, NOT_RECORDED))
        for key, value in run.config.items()
    ]
    defaults = [row[:2] for row in rows if row[2] == str(DEFAULT)]
    chosen = [row for row in rows if row[2] != str(DEFAULT)]
    tables: list[tuple[str, tuple[str, ...], Rows]] = [
        ("Values of this run", ("Key", "Value", "Written"), chosen),
        (f"{len(defaults)} values left at their defaults", ("Key", "Value"), defaults),
    ]
    if not run.origins:
        caption = f"Every value; where each was written is {NOT_RECORDED}"
        tables = [(caption, ("Key", "Value"), [row[:2] for row in rows])]
    return [table for table in tables if table[2]]


def _value(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _environment(run: RunFiles) -> Rows:
    found = run.summary.get("environment")
    known = isinstance(found, Mapping) and found
    return [(key, _value(value)) for key, value in flat(found)] if known else []


def _machines(cluster: Cluster) -> Rows:
    return [
        (
            node.host,
            node.cpu,
            str(node.cores),
            f"{node.memory_gib:.1f} GiB",
            ", ".join(f"{n} x {name}" for name, n in Counter(c.name for c in node.chips).items())
            or "none",
        )
        for node in cluster.nodes
    ]


def _checkpoints(run: RunFiles) -> Rows:
    rows = []
    for found in run.checkpoints:
        step = f"{found.step:,}" + " (latest)" * found.latest
        if found.complete:
            saved = f"{datetime.fromtimestamp(found.saved_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
            rows.append((step, saved, gib(found.bytes), "complete"))
        else:
            problem = found.problem.replace(f"{run.folder}{os.sep}", "")
            rows.append((step, NOT_RECORDED, NOT_RECORDED, f"damaged: {problem}"))
    return rows


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return median(known) if known else None


def _fixed(value: float | None, digits: int) -> str:
    return NOT_RECORDED if value is None else _digits(value, f",.{digits}f")


def _digits(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "not finite"


def _perplexity(loss: float | None) -> str:
    if loss is None:
        return NOT_RECORDED
    value = perplexity(loss)
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e9 else f"{value:.2e}"
