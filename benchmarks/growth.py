"""A model that grows twice, at a thousandth of the published size: losses around each growth.

    python -m benchmarks.growth [--steps N N N] [--out DIR] [--json]

EfficientScale (arXiv 2408.06567) with the ratios of its sizes: 7 M parameters become 15 M by width
(AKI) and depth (interpolation), and these eight experts, on the standard library's source. Beside
it the other ways to grow, and 15 M from the start with as many steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.whole import load_model
from weft.config.load import load_config
from weft.data.batch import spread
from weft.data.prepare import prepare
from weft.train.loop import cut

SMALL = ("d_model=256", "d_ff=896", "num_layers=8", "num_heads=8", "num_kv_heads=2", "d_head=32")
LARGE = ("d_model=320", "d_ff=1280", "num_layers=10", "num_heads=10", "num_kv_heads=2", "d_head=32")
WIDE = ("--d-model", "320", "--d-ff", "1280", "--num-heads", "10")
DEEP = ("--num-layers", "10")
RATES = ("optim.lr=3e-3", "optim.lr=1e-3", "optim.lr=4e-4")
"""In about the ratios of the published ones."""
SETTINGS = (
    *("data.limit_mb=4", "batch.samples=4", "batch.micro=4", "plan.shares=[1]"),
    *("train.eval_samples=64", "checkpoint.every=0", "sample.prompts=[]", "metrics.report=false"),
)

Record = dict[str, Any]


class Stages:
    """The folders of all models, and what was found in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records: list[Record] = []

    def train(self, name: str, target: str, *settings: str) -> None:
        """Train a model, or train on."""
        self._weft("train", target, "--out", name, "--quiet", *settings)
        self._note(name, f"{name}, trained")

    def grow(self, way: str, old: str, new: str, *options: str) -> None:
        """Make one of another; its loss is that of a model that has not trained."""
        self._weft("grow", way, old, new, *options)
        self._note(new, f"{new}, grown from {old}")

    def _weft(self, *words: str) -> None:
        command = [sys.executable, "-m", "weft", *words]
        subprocess.run(command, check=True, cwd=self._folder, stdout=subprocess.DEVNULL)

    def _note(self, name: str, what: str) -> None:
        folder = self._folder / name
        params = sum(
            open_checkpoint(folder).read(n).numel() for n in open_checkpoint(folder).names()
        )
        record = {"name": what, "ours": held_out(folder), "unit": "nats", "parameters": params}
        self.records.append(record)
        print(f"{what:<44} {params / 1e6:6.1f} M  {record['ours']:.4f}", file=sys.stderr)


@torch.no_grad()
def held_out(folder: Path) -> float:
    """Loss of a token of held-out text, in nats."""
    found = next(
        path for name in ("config", "model") if (path := folder / f"{name}.yaml").is_file()
    )
    config = load_config(str(found)).config
    data = prepare(config.data, config.seed, report=lambda *_: None).held_out.open()
    positions = spread(data.num_samples, config.train.eval_samples)
    model = load_model(open_checkpoint(folder))
    total = weight = 0.0
    for low in range(0, len(positions), 8):
        batch = data.batch(positions[low : low + 8])
        sizes, restart = [len(batch.tokens)], config.data.restart_positions
        (part,) = cut(batch, sizes, torch.device("cpu"), restart=restart)
        hidden = model(part.tensors["tokens"], part.context)
        total += model.loss(hidden, part.tensors["targets"], part.tensors["weights"]).item()
        weight += part.tensors["weights"].sum().item()
    return total / weight


def models(sizes: Sequence[str]) -> list[str]:
    """As overrides of a recipe."""
    return [f"model.{size}" for size in sizes]


def main() -> None:
    """Train, grow, train on, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs=3, default=[60, 20, 30])
    parser.add_argument("--out", type=Path, help="Folder of the runs; default: a temporary one.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    first, second, third = (f"train.steps={steps}" for steps in options.steps)
    with tempfile.TemporaryDirectory(prefix="weft-growth-") as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        stages = Stages(folder)
        stages.train("7m", "debug", *SETTINGS, *models(SMALL), RATES[0], first)
        stages.grow("width", "7m", "wide", *WIDE)
        for way in ("identity", "stack", "interpolate"):
            stages.grow("depth", "wide", f"wide-{way}", *DEEP, "--by", way)
        stages.grow("width", "7m", "aki", *WIDE, "--by", "aki")
        stages.grow("depth", "aki", "15m", *DEEP)
        again = ("seed=1", RATES[1], second)
        stages.train("15m", "15m/model.yaml", *again)
        stages.grow("experts", "15m", "8x15m", "--count", "8", "--top-k", "2")
        stages.train("8x15m", "8x15m/model.yaml", "seed=2", RATES[2], third)
        stages.train("from-the-start", "debug", *SETTINGS, *models(LARGE), RATES[0], second)
    if options.json:
        print(json.dumps(stages.records, indent=2))


if __name__ == "__main__":
    main()
