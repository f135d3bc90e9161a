"""Two sites with a slow link between them, beside each alone and exact training: speed and loss.

    python -m benchmarks.sites [--gbit G] [--latency-ms L] [--steps N] [--repeats N] [--json]
    python -m benchmarks.sites --loss [--steps N] [--json]

The lab plays two hosts at a part of a core each. In turns: each host alone with its part of the
batch, both as sites with streaming, both as exact data parallelism. ``--loss`` trains the same
model in one process with two seeds and in two sites, and compares held-out losses. Needs root on
Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.report.metrics import read_metrics

SPEED = 0.4
"""Of a core, each host."""
SAMPLES = 24
"""Of a step, of both."""
LOG_EVERY = 20
FEWER = 4
"""Times fewer steps of exact training."""
SITES = "sites={every: 20, fragments: 2, delay: 8, wire: bf16}"
SETTINGS = (
    "compute.precision=fp32",
    "compute.threads=1",
    "data.workers=0",
    "metrics.report=false",
    "train.eval_samples=4",
)
LOSS_SITES = "sites={every: 50, fragments: 2, delay: 5, wire: bf16}"
LOSS = ("batch.samples=8", "batch.micro=4", "train.eval_every=100", "train.log_every=50")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", type=float, default=0.1)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.loss:
            found = list(losses(Path(folder), asked.steps or 500))
        else:
            steps = asked.steps or 3 * LOG_EVERY
            link = {"gbit": asked.gbit, "latency_ms": asked.latency_ms}
            found = list(speeds(Path(folder), link, steps, asked.repeats))
    lines = (
        f"{row['name']}: {row['ours']:.4g} {row['unit']}, {row['theirs']}, "
        f"ratio {row['ratio']:.3f} (spread {row['spread']:.3f})"
        for row in found
    )
    sys.stdout.write((json.dumps(found, indent=2) if asked.json else "\n".join(lines)) + "\n")


def speeds(
    folder: Path, link: Mapping[str, float], steps: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Tokens a second of two sites beside the sum of each alone, and beside exact training."""
    cluster = folder / "two.yaml"
    hosts = [{"name": name, "chips": [{"kind": "one", "speed": SPEED}]} for name in ("a", "b")]
    cluster.write_text(yaml.safe_dump({"hosts": hosts, "links": {"between": link}}))
    single = folder / "one.yaml"
    single.write_text(yaml.safe_dump({"hosts": hosts[:1]}))
    both = ("plan.shares=[1,1]", f"batch.samples={SAMPLES}")
    alone = ("plan.shares=[1]", f"batch.samples={SAMPLES // 2}")
    ways: Mapping[str, tuple[Path, tuple[str, ...]]] = {
        "a": (single, alone),
        "sites": (cluster, (*both, SITES)),
        "b": (single, alone),
        "exact": (cluster, both),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name, (file, more) in ways.items():
            out = folder / f"{name}-{repeat}"
            few = FEWER if name == "exact" else 1  # slow steps, all alike
            many = f"train.log_every={LOG_EVERY // few}", f"train.steps={steps // few}"
            run_weft(("lab", str(file), "--", "weft", *_train([*SETTINGS, *more, *many], out)))
            found[name].append(tokens_per_s(out, LOG_EVERY // few))
            sys.stderr.write(f"{name}: {found[name][-1]:.0f} tokens/s\n")
    sums = [one + other for one, other in zip(found["a"], found["b"], strict=True)]
    for peer, theirs in (("sum of each alone", sums), ("exact", found["exact"])):
        ratios = [ours / other for ours, other in zip(found["sites"], theirs, strict=True)]
        yield {
            "name": f"two sites at {link}, beside {peer}",
            "ours": statistics.median(found["sites"]),
            "theirs": {peer: statistics.median(theirs)},
            "ratio": statistics.median(ratios),
            "unit": "tokens/s",
            "spread": max(ratios) - min(ratios),
        }


def losses(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Held-out loss of two sites beside exact training with the same seed and with another."""
    ways = {
        "sites": ("plan.shares=[1,1]", LOSS_SITES),
        "exact": ("plan.shares=[1]",),
        "exact, other seed": ("plan.shares=[1]", "seed=2"),
    }
    found: dict[str, float] = {}
    for name, more in ways.items():
        out = folder / name.replace(" ", "-").replace(",", "")
        run_weft(_train([*SETTINGS[:-1], *LOSS, *more, f"train.steps={steps}"], out))
        found[name] = read_metrics(out / "metrics.jsonl")[1][-1].eval_loss
    ours = found.pop("sites")
    yield {
        "name": f"held-out loss after {steps} steps",
        "ours": ours,
        "theirs": found,
        "ratio": ours / found["exact"],
        "unit": "nats",
        "spread": abs(found["exact"] - found["exact, other seed"]),
    }


def tokens_per_s(out: Path, after: int = LOG_EVERY) -> float:
    """Of a run after its first line, what is exchanged between sites included."""
    steps, _ = read_metrics(out / "metrics.jsonl")
    rest = [step for step in steps if step.step > after]
    return sum(step.tokens for step in rest) / sum(step.step_time_s for step in rest)


def _train(settings: Sequence[str], out: Path) -> tuple[str, ...]:
    return ("train", "debug", *settings, "checkpoint.every=0", "--out", str(out), "--quiet")


def run_weft(words: Sequence[str]) -> str:
    """What a command in a process of its own prints, which must succeed."""
    command = [sys.executable, "-m", "weft", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
