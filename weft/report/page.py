"""``report.html``: one page about a run.

Built from the files of the run's folder alone, so it can be written again at any time, also for a
run that crashed: what is not there is called "not recorded". All text of a run is untrusted; the
page escapes it, and its content security policy runs no script but the two it came with.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TypeVar

from markupsafe import Markup

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigError, show
from weft.config.tree import DEFAULT
from weft.plan.plan import Plan
from weft.report.charts import charts, steps_per_point
from weft.report.html import NOT_RECORDED, Table, Tile, asset, render
from weft.report.metrics import EvalMetrics, StepMetrics, perplexity
from weft.report.plan_picture import (
    Picture,
    layers_in_words,
    mesh_in_words,
    picture,
    pipeline_groups,
    ranges,
    summary,
)
from weft.report.prediction_rows import HEADERS, prediction_note, prediction_rows
from weft.report.run_files import UNREADABLE, RunFiles, flat, number, read_run, reason
from weft.report.units import count, duration, gib, percent_or_na

T = TypeVar("T")

_DEFAULT = str(DEFAULT)
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
    temporary = page.with_name(f".{page.name}.{os.getpid()}.tmp")
    temporary.write_text(_render(read_run(run)), encoding="utf-8", errors="replace")
    temporary.replace(page)
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

    curves = charts(run.steps, run.evals, _baselines(run))
    scripts = {}
    if curves:
        scripts = {"plot_script": _plot_script(), "charts_script": asset("charts.js")}
    hashes = " ".join(f"'{_digest(text)}'" for text in scripts.values())
    return render(
        "report.html.j2",
        style=asset("uPlot.min.css"),
        name=str(run.config.get("name") or run.folder.resolve().name),
        subtitle=_subtitle(run),
        status=_status(run),
        tiles=_tiles(run),
        verdict=_verdict(run),
        results=_results(run),
        charts=curves,
        chart_data=[asdict(chart) for chart in curves],
        steps_per_point=steps_per_point(len(run.steps)),
        numbers=_numbers(run.steps, run.evals),
        plan=attempt("plan.json", lambda: run.plan and _plan_view(run.plan)),
        prediction=_prediction(run),
        prediction_note=prediction_note(run.summary),
        samples=_samples(run),
        samples_step=number(run.summary, "step"),
        settings=_settings(run),
        machines=attempt("cluster.json", lambda: run.cluster and _machines(run.cluster)),
        environment=_environment(run),
        checkpoints=_checkpoints(run),
        problems=problems,
        script_policy=hashes or "'none'",
        **{name: Markup(text) for name, text in scripts.items()},
    )


def _plot_script() -> str:
    """uPlot with its licence in the place of its own first line, which has an address in it."""
    _, _, code = asset("uPlot.iife.min.js").partition("\n")
    return f"/*! uPlot\n{asset('uPlot.LICENSE')}*/\n{code}"


def _digest(script: str) -> str:
    """A script as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _subtitle(run: RunFiles) -> str:
    """What was trained on what."""
    family, size = run.config.get("model.family"), run.config.get("model.size")
    parameters = number(run.summary, "parameters")
    parts = [f"{family} {size}"] if family and size else []
    parts += [] if parameters is None else [f"{count(parameters)} parameters"]
    parts += [f"trained on {run.config['data.path']}"] if run.config.get("data.path") else []
    return ", ".join(parts)


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


def _tiles(run: RunFiles) -> list[Tile]:
    held_out, steps = _held_out(run), run.steps
    steady = steps[_WARM_UP_STEPS:] or steps
    speed = number(run.summary, "tokens_per_s") or _median([m.tokens_per_s for m in steady])
    mfu = number(run.summary, "mfu")
    if mfu is None:
        mfu = _median([m.mfu for m in steady if m.mfu is not None])
    memory = max((m.memory_gib for m in steps if math.isfinite(m.memory_gib)), default=None)
    wall_s, known = number(run.summary, "wall_s"), number(run.summary, "parameters")
    training_loss = steps[-1].loss if steps else None
    return [
        Tile(label="Held-out loss", value=_fixed(held_out["loss"], 4), note="nats per token"),
        Tile(label="Perplexity", value=_perplexity(held_out["loss"]), note="held-out"),
        Tile(label="Bits per byte", value=_fixed(held_out["bits"], 3), note="held-out"),
        Tile(label="Training loss", value=_fixed(training_loss, 4), note="last step"),
        Tile(label="Throughput", value=_fixed(speed, 0), note="tokens per second"),
        Tile(label="MFU", value=percent_or_na(mfu), note="of the matmul rate"),
        Tile(label="Memory", value=_fixed(memory, 2), note="GiB, most of any rank"),
        Tile(label="Parameters", value=NOT_RECORDED if known is None else count(known)),
        Tile(label="Time", value=NOT_RECORDED if wall_s is None else duration(wall_s)),
    ]


def _held_out(run: RunFiles) -> dict[str, float | None]:
    """The model's held-out loss in nats per token and in bits per byte."""
    loss = number(run.summary, "held_out", "loss")
    bits = number(run.summary, "held_out", "bits_per_byte")
    written = number(run.summary, "step")
    newer = [m for m in run.evals if loss is None or (written is not None and m.step > written)]
    if newer and math.isfinite(newer[-1].eval_loss):
        loss, bits = newer[-1].eval_loss, None
    return {"loss": loss, "bits": _bits_per_byte(run, loss) if bits is None else bits}


def _bits_per_byte(run: RunFiles, loss: float | None) -> float | None:
    tokens = number(run.summary, "held_out", "tokens")
    num_bytes = number(run.summary, "held_out", "bytes")
    if loss is None or tokens is None or not num_bytes:
        return None
    return loss * tokens / num_bytes / math.log(2)


def _results(run: RunFiles) -> Table | None:
    held_out = _held_out(run)
    if held_out["loss"] is None:
        return None
    entries = [("this model", held_out["loss"], held_out["bits"])]
    for name, loss in _baselines(run).items():
        entries.append((f"{name} baseline", loss, _bits_per_byte(run, loss)))
    return Table(
        caption="Held-out text: lower is better",
        headers=("Model", "Loss (nats per token)", "Perplexity", "Bits per byte"),
        rows=[(name, _fixed(a, 4), _perplexity(a), _fixed(b, 3)) for name, a, b in entries],
        numeric=True,
    )


def _verdict(run: RunFiles) -> str:
    """How the model compares with the baselines."""
    loss = _held_out(run)["loss"]
    if loss is None:
        return ""
    differences = [
        f"{abs(base - loss):.2f} nats {'below' if loss < base else 'above'} the {name} baseline"
        for name, base in _baselines(run).items()
    ]
    return f"Held-out loss lies {' and '.join(differences)}." if differences else ""


def _numbers(steps: Sequence[StepMetrics], evals: Sequence[EvalMetrics]) -> Table | None:
    """What the charts show, at a few steps: spread evenly, evaluations included, the last too."""
    by_step = {m.step: m for m in steps}
    held_out = {m.step: m.eval_loss for m in evals}
    chosen = sorted({*_spread(list(by_step)), *_spread(list(held_out))})
    rows = []
    for step in chosen:
        loss = held_out.get(step)
        row = (f"{step:,}", *_step_cells(by_step.get(step)))
        rows.append((*row[:2], "" if loss is None else _fixed(loss, 4), *row[2:]))
    caption = f"The numbers at {len(rows)} of {len(by_step):,} steps, the last included"
    loss_headers = ("Step", "Loss", "Held-out loss")
    rest = ("Gradient norm", "Learning rate", "Tokens/s", "MFU", "Memory (GiB)")
    headers = (*loss_headers, *rest)
    return Table(caption=caption, headers=headers, rows=rows, numeric=True) if rows else None


def _step_cells(metrics: StepMetrics | None) -> tuple[str, ...]:
    if metrics is None:
        return ("",) * 6
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanView:
    """The plan as a sentence, a picture and a table."""

    summary: str
    picture: Picture
    table: Table


def _plan_view(plan: Plan) -> PlanView:
    return PlanView(summary=summary(plan), picture=picture(plan), table=_plan_table(plan))


def _plan_table(plan: Plan) -> Table:
    rows = []
    for group in pipeline_groups(plan):
        pipeline, share = group.pipelines[0], group.samples / max(1, plan.global_batch)
        for number_, stage in enumerate(pipeline.stages):
            ends = {"is_first": number_ == 0, "is_last": number_ == len(pipeline.stages) - 1}
            held = [r for p in group.pipelines for r in p.stages[number_].mesh.ranks]
            extras = [f"recompute {stage.recompute}"] * (stage.recompute != "off")
            extras += ["compiled"] * stage.compile
            rows.append(
                (
                    f"{group.name}, stage {number_}",
                    f"{group.samples:,} ({share:.0%})",
                    f"{pipeline.num_microbatches:,} of {pipeline.microbatch:,}",
                    layers_in_words(stage, **ends),
                    _ranks(held),
                    mesh_in_words(stage) or "one rank",
                    f"{stage.device} {stage.precision}",
                    ", ".join(extras) or "none",
                )
            )
    return Table(
        caption="The plan, stage by stage",
        headers=(
            "Pipeline",
            "Samples a step",
            "Microbatches of samples",
            "Layers",
            "Ranks",
            "Mesh",
            "Chip",
            "Extras",
        ),
        rows=rows,
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Which ranks; for many scattered ones the first few and how many there are."""
    parts = ranges(sorted(ranks)).split(", ")
    if len(parts) <= _MOST_RANGES:
        return ", ".join(parts)
    return f"{', '.join(parts[:_MOST_RANGES])} and more, {len(ranks):,} in all"


def _prediction(run: RunFiles) -> Table | None:
    rows = prediction_rows(run.summary)
    caption = "What a step was predicted to take, and what it took"
    return Table(caption=caption, headers=HEADERS, rows=rows, numeric=True) if rows else None


def _samples(run: RunFiles) -> list[tuple[str, str]]:
    """(prompt, text that the model wrote after it)."""
    found = run.summary.get("samples")
    entries = found if isinstance(found, list) else []
    return [
        (str(entry.get("prompt", "")), str(entry.get("text", "")).rstrip())
        for entry in entries
        if isinstance(entry, Mapping)
    ]


def _settings(run: RunFiles) -> list[Table]:
    """What was chosen, and what was left at its default. One table if that is not known."""
    rows = [(key, _value(value)) for key, value in run.config.items()]
    if not rows:
        return []
    if not run.origins:
        caption = f"Every value; where each was written is {NOT_RECORDED}"
        return [Table(caption=caption, headers=("Key", "Value"), rows=rows)]
    placed = [(*row, run.origins.get(row[0], NOT_RECORDED)) for row in rows]
    defaults = [row for row in placed if row[2] == _DEFAULT]
    chosen = [row for row in placed if row[2] != _DEFAULT]
    headers = ("Key", "Value", "Written")
    caption = f"{len(defaults)} values left at their defaults"
    tables = [
        Table(caption="Values of this run", headers=headers, rows=chosen),
        Table(caption=caption, headers=headers[:2], rows=[row[:2] for row in defaults]),
    ]
    return [table for table in tables if table.rows]


def _value(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _environment(run: RunFiles) -> Table | None:
    found = run.summary.get("environment")
    if not isinstance(found, Mapping) or not found:
        return None
    rows = [(key, _value(value)) for key, value in flat(found)]
    return Table(caption="Versions and settings", headers=("What", "Value"), rows=rows)


def _machines(cluster: Cluster) -> Table | None:
    rows = []
    for node in cluster.nodes:
        names = [chip.name for chip in node.chips]
        counts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        memory = f"{node.memory_gib:.1f} GiB"
        rows.append((node.host, node.cpu, str(node.cores), memory, ", ".join(counts) or "none"))
    headers = ("Machine", "Processor", "Cores", "Memory", "Accelerators")
    return Table(caption="Machines", headers=headers, rows=rows) if rows else None


def _checkpoints(run: RunFiles) -> Table | None:
    rows = []
    for found in run.checkpoints:
        problem = found.problem.replace(f"{run.folder}{os.sep}", "")
        state = "complete" if found.complete else f"damaged: {problem}"
        saved = datetime.fromtimestamp(found.saved_at, UTC) if found.complete else None
        rows.append(
            (
                f"{found.step:,}" + (" (latest)" if found.latest else ""),
                f"{saved:%Y-%m-%d %H:%M:%S} UTC" if saved else NOT_RECORDED,
                gib(found.bytes) if found.complete else NOT_RECORDED,
                state,
            )
        )
    headers = ("Step", "Saved", "Size", "State")
    return Table(caption="Saved states of the run", headers=headers, rows=rows) if rows else None


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
