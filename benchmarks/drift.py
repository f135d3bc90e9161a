"""What a rank that becomes slow costs, and what planning again gives back: ``python -m
benchmarks.drift`` (as root).

Two ranks of ``weft train`` get parts of a core each, by control groups as the lab has them. In the
middle of the run one of them gets less, and later its part again; with ``recovery.alarm=replan``
the run plans again each time. Printed are tokens a second beside those before, each the median of
some steps, and the plans.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.lab.cgroups import ControlGroups, control_groups
from weft.lab.identity import Identity, fields_of

WEFT = [sys.executable, "-m", "weft"]
CONFIG = """\
extends: demo
name: drift
model: {d_model: 256, d_ff: 704, d_head: 32, num_layers: 6, num_heads: 8, num_kv_heads: 8}
data: {seq_len: 128, tokenizer: bytes, workers: 0}
batch: {samples: 18}
plan: {auto: {ranks: 2}}
compute: {device: cpu, threads: 1}
train: {steps: 1000000, eval_every: 0, log_every: 1}
checkpoint: {every: 0, minutes: 0}
recovery: {alarm: replan}
"""
WARM_UP = 4
LOOK_S = 0.1


class Training:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self._process, self._out = process, out

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self._out / name
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows("metrics.jsonl")), default=0)

    def replans(self) -> list[dict[str, Any]]:
        found = [row for row in self.rows("events.jsonl") if row["kind"] == "replan"]
        return [row for row in found if "predicted_s" in row["facts"]]

    def wait_for(self, step: int, replans: int = 0) -> None:
        while self.step < step or len(self.replans()) < replans:
            if self._process.poll() is not None:
                raise SystemExit(f"the run ended before: see {self._out}")
            time.sleep(LOOK_S)

    def tokens_per_s(self, first: int, last: int) -> float:
        """The median of these steps."""
        rows = self.rows("metrics.jsonl")
        found = [float(r["tokens_per_s"]) for r in rows if first <= r["step"] <= last]
        return statistics.median(found)

    def samples(self) -> str:
        """Of each pipeline of the plan."""
        plan = json.loads((self._out / "plan.json").read_text())
        return " + ".join(f"{pipeline['samples']}" for pipeline in plan["pipelines"])

    def ranks(self) -> list[int]:
        """Process ids, rank 1 last: it prints to a log of its own."""
        log = str(self._out.resolve() / "logs/rank1.log")
        mine = [pid for pid in _pids() if os.getsid(pid) == self._process.pid]
        (other,) = [pid for pid in mine if _stdout(pid) == log]
        (first,) = [pid for pid in mine if _parent(pid) == _parent(other) and pid != other]
        return [first, other]


def _pids() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            os.getsid(int(path.name))
        except ProcessLookupError:
            continue
        yield int(path.name)


def _stdout(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def _parent(pid: int) -> str:
    return (fields_of(pid) or ["", ""])[1]


@contextmanager
def training(folder: Path) -> Iterator[Training]:
    """A run of two ranks, on cores that were measured just before."""
    (folder / "drift.yaml").write_text(CONFIG)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_PROFILES": str(folder / "profiles")}
    quick = ["chips", "profile", "--quick", "--device", "cpu"]
    subprocess.run([*WEFT, *quick], env=environment, check=True, stdout=subprocess.DEVNULL)
    out, log = folder / "run", (folder / "log").open("w")
    words = ["train", str(folder / "drift.yaml"), "--out", str(out)]
    process = subprocess.Popen(
        [*WEFT, *words],
        env=environment,
        cwd=folder,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield Training(process, out)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextmanager
def control() -> Iterator[ControlGroups]:
    """A group for each rank."""
    groups = control_groups(Identity.own())
    try:
        groups.build(2)
        for rank in range(2):
            groups.add(rank)
        yield groups
    finally:
        groups.remove()


def measured(run: Training, groups: ControlGroups, speed: float, slow: float, steps: int) -> None:
    """Print what each part of the run does."""

    def part(words: str, samples: str, first: int, last: int) -> None:
        rate = run.tokens_per_s(first, last)
        rates.append(rate)
        steps = last - first + 1
        print(f"| {words} | {samples} | {steps} | {rate / rates[0]:.2f} |", flush=True)

    def phase(name: str, rank1: float, number: int) -> None:
        """Rank 1 has another part of a core, until the run has planned again and after it."""
        groups.set_speed(1, rank1)
        began, before = run.step + 2, run.samples()
        run.wait_for(began, number)
        moved = run.replans()[-1]["step"]
        part(name, before, began, moved)
        run.wait_for(moved + 1 + steps)
        said = run.replans()[-1]["message"]
        part(said, run.samples(), moved + 2, moved + 1 + steps)

    rates: list[float] = []
    run.wait_for(1)
    for rank, pid in enumerate(run.ranks()):
        groups.set_speed(rank, speed)
        for entry in groups.entries(rank):
            entry.write_text(str(pid))
    print("| | samples | steps | tokens/s beside before |\n|---|---|---|---|")
    first = run.step + WARM_UP
    run.wait_for(first + steps)
    part(f"both ranks have {speed:g} of a core", run.samples(), first, first + steps)
    planned = len(run.replans())
    phase(f"rank 1 has {slow:g}", slow, planned + 1)
    phase(f"rank 1 has {speed:g} again", speed, planned + 2)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=0.6, help="part of a core of each rank")
    parser.add_argument("--slow", type=float, default=0.2, help="and of rank 1 in the middle")
    parser.add_argument("--steps", type=int, default=20, help="of each part")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="weft-drift-") as folder,
        control() as groups,
        training(Path(folder)) as run,
    ):
        measured(run, groups, options.speed, options.slow, options.steps)


if __name__ == "__main__":
    main()
