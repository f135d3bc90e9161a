"""What only a card can show: correctness, speed, memory, files and faults, part by part.

    python -m benchmarks.gpu [--minutes 60] [--only NAMES] [--device cuda] [--out FILE] [--again]

Each part runs in a process of its own with a limit of its own, and leaves in FILE what it proved,
what it measured, or what stopped it; the others go on. Called again, it goes on with the parts
that are not proved yet, those that failed at the end, so an hour may be had in calls of
``--minutes 9``. With ``--device cpu`` the same parts run small. ``--table`` prints the table for
``docs/performance.md``, no more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.devices import number_of
from benchmarks.gpu import beside, correct, eight_bits, environment, faults, memory, speed
from benchmarks.gpu.part import Part
from weft.config.errors import ConfigError
from weft.platform.detect import detect_node

MODULES = (environment, correct, speed, eight_bits, memory, beside, faults)
THEMES = {part.name: part for module in MODULES for part in module.PARTS}
ORDER = (
    "environment", "verify-fp64", "speed-1b", "verify-fp32", "memory", "speed-8b-slice", "fp8",
    "checkpoint", "shared", "crowd", "crowd-queues", "mixed", "prediction", "attention", "head",
    "faults", "gradients", "long-run", "sanitizer", "links", "company", "among-cards", "peers-8b",
    "peers", "pieces", "faults-many", "exposed",
)  # fmt: skip
"""The most important first."""
PARTS: tuple[Part, ...] = tuple(THEMES[name] for name in ORDER)
LEAST_S = 20.0
"""With less time left no part begins."""
GONE = "the process ended without a word"


def main() -> None:
    """Run the parts that are not proved yet, as far as the minutes go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", default="", help=f"of {', '.join(ORDER)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="also what is proved")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or ORDER
    if unknown := [name for name in chosen if name not in THEMES]:
        parser.error(
            f"--only: no part is called {', '.join(unknown)}; there are {', '.join(ORDER)}"
        )
    file = options.out or Path(f".weft/gpu-{options.device}.json")
    state = _read(file)
    if options.table:
        print(table(state))
        return
    try:
        number = number_of(options.device)
    except ConfigError as error:
        parser.error(str(error))
    about = machine(options.device)
    if state["parts"] and (state["card"], state["torch"]) != (about["card"], about["torch"]):
        parser.error(
            f"{file} is of {state['card']} with torch {state['torch']}; name another --out"
        )
    state |= about
    signal.signal(signal.SIGTERM, _stopped)
    end = time.monotonic() + 60 * options.minutes
    parts = [part for part in PARTS if part.name in chosen]
    parts.sort(key=lambda part: state["parts"].get(part.name, {}).get("state") == "failed")
    for part in parts:
        known = state["parts"].get(part.name, {})
        if known.get("state") == "proved" and not options.again:
            continue
        state["parts"][part.name] = run(part, options.device, number, end - time.monotonic())
        _write(file, state)
        print(f"{part.name}: {_words(state['parts'][part.name])}", flush=True)
    print(f"\n{table(state)}\n\nresults: {file}")
    sys.exit(any(each["state"] == "failed" for each in state["parts"].values()))


def _stopped(number: int, _: object) -> None:
    """Asked to end: by way of what ends the part that runs, and all that it started."""
    sys.exit(128 + number)


def machine(device: str) -> dict[str, Any]:
    """What the figures belong to."""
    node = detect_node()
    chips = [chip.name for chip in node.chips if chip.device == device]
    drivers = "/proc/driver/nvidia/version"
    driver = Path(drivers).read_text().splitlines()[0] if Path(drivers).exists() else ""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": device,
        "card": f"{len(chips)} x {chips[0]}" if chips else node.cpu,
        "driver": driver,
        "torch": torch.__version__,
    }


def run(part: Part, device: str, number: int, left_s: float) -> dict[str, Any]:
    """One part in a process of its own; what it found, or what stopped it."""
    if number < part.devices:
        return {"state": "skipped", "error": f"needs {part.devices} GPUs, found {number}"}
    limit_s = 60 * part.minutes
    if left_s < min(limit_s, max(LEAST_S, limit_s / 4)):
        return {"state": "left", "error": f"takes up to {part.minutes:g} min; call again"}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        file, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "benchmarks.gpu.child", part.name, device, str(number)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, folder], stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(min(limit_s, left_s))
                error = "" if code == 0 else _last_line(log) or GONE
                state = "proved" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                is_own = limit_s <= left_s
                state = "failed" if is_own else "left"
                error = f"ended after {min(limit_s, left_s):.0f} s"
            finally:
                _end(process)
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
        tail = log.read_text("utf-8", errors="replace")[-4000:] if error else ""
    seconds = round(time.monotonic() - begun, 1)
    return {"state": state, "error": error, "seconds": seconds, "log": tail, **found}


def _end(process: subprocess.Popen[bytes]) -> None:
    """A part and all that it started, by the number of their group; nothing else."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else ""


def _read(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"parts": {}, "card": "", "torch": ""}
    return json.loads(file.read_text("utf-8")) if file.exists() else empty


def _write(file: Path, state: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(state, indent=1), "utf-8")
    draft.replace(file)


def _words(record: dict[str, Any]) -> str:
    proved = len(record.get("proved", ()))
    took = f" in {record['seconds']:g} s" if "seconds" in record else ""
    why = f": {record['error']}" if record["error"] else ""
    return f"{record['state']}{took}, {proved} statements{why}"


def table(state: dict[str, Any]) -> str:
    """For ``docs/performance.md``."""
    lines = [
        ", ".join(filter(None, (
            f"`python -m benchmarks.gpu --device {state.get('device', '?')}`", state.get("date"),
            state["card"], state.get("driver"), f"torch {state['torch']}",
        ))),
        "",
        "| part | result | proved | measured |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for part in PARTS:
        record = state["parts"].get(part.name)
        if record is None:
            continue
        proved = record.get("proved", [])
        measured = "; ".join(
            f"{what} {value}" for what, value in record.get("measured", {}).items()
        )
        result = record["state"] + (f": {record['error']}" if record["error"] else "")
        said = "; ".join(proved[:2]) + (f"; {len(proved) - 2} more" if len(proved) > 2 else "")
        lines.append(f"| {part.name}: {part.asks} | {result} | {said} | {measured} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
