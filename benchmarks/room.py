"""A fast chip with a third of the memory of a slow one: state where there is room, in the lab.

    python -m benchmarks.room [--steps N] [--repeats N] [--json]

The planner's best plan for the two chips, and the best of those whose ranks have equal parts of
what they share, of the same search. Both run in turns in the lab, where the kernel enforces speeds,
the link and memory: a rank that holds more than its chip has is killed. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.sites import run_weft, tokens_per_s
from weft.cluster.view import ClusterView
from weft.config.load import load_config
from weft.plan.plan import Plan
from weft.plan.plan_file import PlanFile, nodes_used
from weft.planner.search import search
from weft.planner.search.found import Candidate
from weft.platform.detect import detect_node
from weft.resolve.cluster_plan import plan_request
from weft.resolve.rank_chips import chips_of_file

HOSTS = [
    {"name": "quick", "chips": [{"kind": "quick", "speed": 1.0, "memory_gib": 0.75}]},
    {"name": "roomy", "chips": [{"kind": "roomy", "speed": 0.4, "memory_gib": 2.25}]},
]
MARGIN = 0.85
"""Of each chip's memory, what both plans are made for: what is predicted may be a little short."""
SETTINGS = (
    "model.num_layers=16",
    "model.d_model=512",
    "model.d_ff=1408",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "batch.samples=8",
    "data.seq_len=512",
    "compute.threads=1",
    "data.workers=0",
    "metrics.report=false",
    "train.eval_samples=2",
    "train.log_every=1",
    "sample.tokens=1",
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), asked.steps, asked.repeats)
    if asked.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for name in ("unequal", "equal"):
        speed, words = found["tokens_s"][name], found["plans"][name]
        sys.stdout.write(f"{name} parts: {speed:.0f} tokens/s, {words}\n")
    sys.stdout.write(
        f"{found['ratio']:.2f} times as fast (spread {found['spread']:.2f}), "
        f"predicted {found['predicted']:.2f}\n"
    )


def measured(folder: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of both plans, in turns."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"hosts": HOSTS}))
    view = tight(cluster)
    plans = planned(cluster, view)
    for name, plan in plans.items():
        used = nodes_used(plan.cluster, view)
        (folder / f"{name}.json").write_text(
            json.dumps(PlanFile(plan=plan.plan, chips=used).to_data())
        )
    speeds: dict[str, list[float]] = {name: [] for name in plans}
    for repeat in range(repeats):
        for name in plans:
            out = folder / f"{name}{repeat}"
            settings = (*SETTINGS, f"train.steps={steps}", f"plan.file={folder / name}.json")
            words = ("train", "demo", *settings, "checkpoint.every=0", "--out", str(out), "--quiet")
            run_weft(("lab", str(cluster), "--", "weft", *words))
            speeds[name].append(tokens_per_s(out, 1))
            sys.stderr.write(f"{name}: {speeds[name][-1]:.0f} tokens/s\n")
    ratios = [o / e for o, e in zip(speeds["unequal"], speeds["equal"], strict=True)]
    return {
        "tokens_s": {name: statistics.median(each) for name, each in speeds.items()},
        "plans": {name: plan.name for name, plan in plans.items()},
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "predicted": plans["equal"].time.step_s / plans["unequal"].time.step_s,
    }


def tight(cluster: Path) -> ClusterView:
    """The chips, with a little less memory than they have."""
    pools = chips_of_file(cluster, detect_node(), len(HOSTS)).view.pools
    return ClusterView(
        tuple(
            replace(each, chip=replace(each.chip, memory_gib=MARGIN * each.chip.memory_gib))
            for each in pools
        )
    )


def planned(cluster: Path, view: ClusterView) -> dict[str, Candidate]:
    """Of one search: the best plan, and the best with equal parts of state."""
    chips = chips_of_file(cluster, detect_node(), view.world_size)
    loaded = load_config("demo", [*SETTINGS, "compute.precision=fp32", "plan=auto"])
    found = search(plan_request(loaded, view, chips.knowledge).problem)
    best = {}
    for name, wanted in (("unequal", True), ("equal", False)):
        every = (found.best, *found.others)
        best[name] = next(each for each in every if _has_unequal(each.plan) == wanted)
    return best


def _has_unequal(plan: Plan) -> bool:
    """Ranks that share parameters keep unequal parts of them."""
    return any(stage.state_shares for pipe in plan.pipelines for stage in pipe.stages)


if __name__ == "__main__":
    main()
