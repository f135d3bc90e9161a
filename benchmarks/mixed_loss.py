"""Mixed against homogeneous training from one checkpoint: do losses differ by more than rounding?

    python -m benchmarks.mixed_loss [--cluster FILE] [--steps N] [--out DIR] [--json]

One chip trains a third of the steps and saves. From that checkpoint go on: the same chip, the same
chip with another seed (the noise floor: other samples from there on), and the mixed cluster in the
lab with data parallel shares and as a pipeline. ``weft compare`` does the rest: the order of data,
each step's losses against the band of rounding, evaluations against the noise floor.
Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.report.compare_page import lines, tables
from weft.report.compare_runs import Comparison, compare_runs

ALONE = "plan.shares=[1]"
MIXED = {
    "data parallel": "plan.shares=[5,2]",
    "pipeline": "plan.stages=[{layers: null}, {layers: 1}]",
}
SETTINGS = (
    "batch.samples=28",
    "train.eval_every=10",
    "metrics.report=false",
    "compute.precision=fp32",
    "compute.threads=1",
)

Record = dict[str, Any]


class Runs:
    """The run folders, and the command that fills them."""

    def __init__(self, folder: Path, cluster: Path, steps: int) -> None:
        self._folder = folder
        self._cluster = cluster
        self._settings = [*SETTINGS, f"train.steps={steps}", f"checkpoint.every={steps}"]

    def start(self, steps: int) -> None:
        """Train on one chip, and save."""
        self._train(self.folder("start"), ALONE, ["--steps", str(steps)], mixed=False)

    def go_on(self, name: str, plan: str, *, mixed: bool, seed: int | None = None) -> None:
        """A copy of the first run goes on with a plan."""
        folder = self.folder(name)
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(self.folder("start"), folder)
        more = []
        if seed is not None:  # another run, as far as the rules of going on are concerned
            file = folder / "config.yaml"
            config = yaml.safe_load(file.read_text("utf-8"))
            file.write_text(yaml.safe_dump({**config, "seed": seed}), "utf-8")
            more = [f"seed={seed}"]
        self._train(folder, plan, more, mixed=mixed)

    def folder(self, name: str) -> Path:
        return self._folder / name.replace(" ", "-")

    def _train(self, folder: Path, plan: str, more: Sequence[str], *, mixed: bool) -> None:
        weft = [sys.executable, "-m", "weft"]
        settings = [*self._settings, plan, *more, "--out", str(folder), "--quiet"]
        if mixed:
            command = [*weft, "lab", str(self._cluster), "--", "weft", "train", "debug", *settings]
        else:
            command = [*weft, "train", "debug", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def record(name: str, found: Comparison) -> Record:
    """The schema that every benchmark prints: the largest part of the band that was used."""
    after = [pair for pair in found.pairs if pair.difference]
    worst = max(after, key=lambda pair: abs(pair.difference) / pair.band, default=found.pairs[-1])
    evals, noise = found.evals, found.noise
    assert evals is not None and noise is not None, "every run evaluates, and so do the seeds"
    return {
        "name": f"loss, {name} against one chip",
        "ours": abs(worst.difference),
        "theirs": {"band": worst.band},
        "ratio": worst.band / abs(worst.difference) if worst.difference else None,
        "unit": "nats",
        "same_data": found.unlike_data == (),
        "inside": found.ok,
        "evaluations": {
            "mean": evals.mean,
            "mean_absolute": evals.mean_absolute,
            "largest": evals.largest,
            "noise_mean_absolute": noise.mean_absolute,
            "noise_largest": noise.largest,
        },
    }


def main() -> None:
    """Run all four, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", type=Path, default=Path("examples/clusters/mix-1.0-0.4.yaml"))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--out", type=Path, help="Folder of the runs; default: a temporary one.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-mixed-") as temporary:
        runs = Runs(options.out or Path(temporary), options.cluster, options.steps)
        runs.start(options.steps // 3)
        runs.go_on("alone", ALONE, mixed=False)
        runs.go_on("other seed", ALONE, mixed=False, seed=1)
        noise = (runs.folder("alone"), runs.folder("other seed"))
        records = []
        for name, plan in MIXED.items():
            runs.go_on(name, plan, mixed=True)
            found = compare_runs(runs.folder("alone"), runs.folder(name), noise)
            records.append(record(name, found))
            if not options.json:
                _show(name, found)
    if options.json:
        print(json.dumps(records, indent=2))


def _show(name: str, found: Comparison) -> None:
    print(f"\n{name} against one chip")
    for table in tables(found):
        if table.caption.startswith("Held-out"):
            print(" | ".join(table.headers))
            for row in table.rows:
                print(" | ".join(row))
    for line in lines(found):
        print(line)


if __name__ == "__main__":
    main()
