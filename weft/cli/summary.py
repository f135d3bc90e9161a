"""The last lines of ``weft train``: what it came to, and with ``--comm-report`` what it sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from shlex import quote
from typing import Any

from weft.cli.output import COLUMNS, out, print_table
from weft.report.goodput import Goodput, goodput_in_words
from weft.report.prediction_rows import HEADERS, prediction_note, prediction_rows
from weft.report.waits import HEADERS as WAITS
from weft.report.waits import NUMBERS, wait_rows
from weft.train.job import PROFILE_FOLDER, TRAFFIC_FILE


def print_summary(folder: Path, summary: Mapping[str, Any], checkpoints: object) -> None:
    """Held-out loss beside those of the baselines, samples, and the paths of what was written."""
    out.print()
    out.print(*_held_out(summary["held_out"], summary["baselines"]), sep="\n", markup=True)
    for sample in summary["samples"]:
        out.print("─" * 60, style="dim")
        out.print(sample["prompt"], style="bold", end="")
        out.print(sample["text"])
    out.print()
    if rows := prediction_rows(summary):
        print_table(HEADERS, rows, right=HEADERS[1:], **COLUMNS)
    if note := prediction_note(summary):
        out.print(note, style="dim")
    if rows := wait_rows(summary):
        print_table(WAITS, rows, right=NUMBERS, **COLUMNS)
    if (found := Goodput.from_json(summary.get("goodput"))) is not None:
        out.print(goodput_in_words(found))
    out.print()
    if (page := folder / "report.html").exists():
        out.print(f"report:     {page}")
    out.print(f"checkpoint: {checkpoints}")
    out.print(f"go on with: weft chat {quote(str(folder))}")


def _held_out(found: Mapping[str, Any] | None, baselines: Mapping[str, float]) -> Iterator[str]:
    if found is None:
        yield "no held-out text to judge the model by (data.held_out is 0)"
        return
    if found["loss"] is None:
        yield "[red]the held-out loss is not a finite number: training diverged[/]"
    else:
        perplexity = found["perplexity"]
        yield (
            f"[bold]held-out loss {found['loss']:.4f}[/] nats a token: perplexity "
            f"{'beyond all numbers' if perplexity is None else f'{perplexity:.2f}'}, "
            f"{found['bits_per_byte']:.3f} bits a byte"
        )
    for name, loss in baselines.items():
        yield f"  a {name} model reaches {loss:.4f}"


def print_traffic(folder: Path) -> None:
    """What a step sent, added up over ranks; calls and peers of the rank that has most."""
    key = itemgetter("name", "link")
    record = sorted(json.loads((folder / TRAFFIC_FILE).read_text())["per_step"], key=key)
    rows = []
    for (name, link), same in groupby(record, key=key):
        of_ranks = list(same)
        calls = max(row["calls"] for row in of_ranks)
        messages = sum(row["messages"] for row in of_ranks)
        megabytes = sum(row["bytes"] for row in of_ranks) / 1e6
        peers = max(len(row["peers"]) for row in of_ranks)
        rows.append((name, link, f"{calls:g}", f"{messages:g}", f"{megabytes:.3f}", str(peers)))
    headers = ("collective", "link", "calls", "messages", "MB", "peers")
    out.print()
    print_table(
        headers, rows, right=headers[2:], title="sent in one step", title_justify="left", **COLUMNS
    )


def profile_of(folder: Path) -> dict[str, Any] | None:
    """What the traces of a run say, where there are any."""
    file = folder / PROFILE_FOLDER / "summary.json"
    return json.loads(file.read_text()) if file.exists() else None


def print_profile(folder: Path) -> None:
    """Where each rank's time went, how long it waited for the others, and for what."""
    record = profile_of(folder)
    if record is None:
        out.print("no traces: the first step is never traced, and there was no other")
        return
    first, last = record["steps"]
    traces = f"{folder / PROFILE_FOLDER}/rank*.json.gz"
    out.print(f"traces of steps {first} to {last}: {traces}, for ui.perfetto.dev", markup=False)
    for rank in record["ranks"]:
        step, waits = rank["step_s"], rank["waits_s"]
        parts = [f"{name} {s / step:.0%}" for name, s in waits.items() if s > 0.005 * step]
        part = f"{sum(waits.values()) / step:.0%} of it waiting for others"
        what = ": " + ", ".join(parts) if parts else ""
        out.print(f"rank {rank['rank']}: {step:.3g} s a step, {part}{what}", markup=False)
        spent = ", ".join(f"{name} {s / step:.0%}" for name, s in rank["parts_s"].items())
        memory = rank["memory"]
        most, where = memory["peak_bytes"] / 2**20, memory["peak_in"] or "between actions"
        out.print(f"  {spent}; at most {most:,.1f} MiB of tensors, in {where}", markup=False)
    if any(rank["snapshot"] for rank in record["ranks"]):
        snapshots = f"{folder / PROFILE_FOLDER}/rank*.memory.pickle"
        out.print(f"history of memory: {snapshots}, for docs.pytorch.org/memory_viz", markup=False)
