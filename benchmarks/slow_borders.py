"""Pipelines over slow links in the lab: 1F1B beside lists with more micro-batches in flight.

    python -m benchmarks.slow_borders [--only CASE] [--repeats N] [--steps N] [--json]

Hosts at parts of a core that add up to less than the machine has, joined by links that are busy for
half of the slowest stage's time with what a host sends of a micro-batch: one message of two hosts,
two of those in the middle of four. How long a stage takes is measured first, with fast links, from
the processor time of its rank. Then in
turns 1F1B and the list that is made for these times; beside their speeds and the ratio what the
simulator says of them. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.sites import run_weft, tokens_per_s
from weft.config.load import load_config
from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan, Plan
from weft.platform.detect import detect
from weft.resolve.resolve import resolve
from weft.simulate.made.make import Making, make

LOG_EVERY = 4
MICRO, MICROBATCHES, SEQ, WIDTH = 2, 24, 128, 128
SETTINGS = (
    "compute.threads=1",
    "data.workers=0",
    "metrics.report=false",
    "train.eval_samples=4",
    f"train.log_every={LOG_EVERY}",
    f"batch.samples={MICRO * MICROBATCHES}",
    f"data.seq_len={SEQ}",
)
FAST = 10.0
"""Gbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Stages on hosts, one each."""

    name: str
    speeds: tuple[float, ...]
    layers: tuple[int, ...]
    border: float
    """What crosses takes this part of a stage's time, each way."""


CASES = (
    Case(name="two hosts", speeds=(0.4, 0.4), layers=(4, 3), border=0.5),
    Case(name="four unlike stages", speeds=(0.2,) * 4, layers=(2, 3, 2, 2), border=0.25),
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in CASES if asked.only in (None, case.name)]
        parts = {case: Path(folder, str(number)) for number, case in enumerate(cases)}
        found = [measured(case, part, asked.steps, asked.repeats) for case, part in parts.items()]
    lines = (
        f"{row['name']}: {row['ratio']:.3f} times as fast (spread {row['spread']:.3f}, "
        f"simulated {row['simulated']:.3f}): {row['order']}; tokens/s measured and simulated: "
        f"{row['tokens_s']}, {row['simulated_tokens_s']}"
        for row in found
    )
    sys.stdout.write((json.dumps(found, indent=2) if asked.json else "\n".join(lines)) + "\n")


def measured(case: Case, folder: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Ratios of tokens a second, and what the simulator says."""
    usual = _plan(case)
    whole, used = _run(case, folder / "fast", FAST, steps, usual)
    tokens = MICRO * MICROBATCHES * SEQ
    step_s = tokens / whole
    seconds = [part * step_s / MICROBATCHES for part in used]
    making = _making(case, usual.pipelines[0], seconds)
    found = make(making)
    own = replace(usual, pipelines=(found,))
    usual_s, own_s = making.seconds(making.pipeline), making.seconds(found)
    gbit = MICRO * SEQ * WIDTH * 4 * 8 / (case.border * max(seconds)) / 1e9
    speeds: dict[str, list[float]] = {"usual": [], "own": []}
    for repeat in range(repeats):
        for name, plan in (("usual", usual), ("own", own)):
            speed, _ = _run(case, folder / f"{name}{repeat}", gbit, steps, plan)
            speeds[name].append(speed)
    ratios = [o / u for o, u in zip(speeds["own"], speeds["usual"], strict=True)]
    return {
        "name": case.name,
        "gbit_s": gbit,
        "order": found.order,
        "tokens_s": {name: statistics.median(each) for name, each in speeds.items()},
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "simulated_tokens_s": {"usual": tokens / usual_s, "own": tokens / own_s},
        "simulated": usual_s / own_s,
    }


def _plan(case: Case) -> Plan:
    """One chip a stage, under 1F1B."""
    stages = ", ".join(f"{{layers: {many}}}" for many in case.layers)
    model = f"model.num_layers={sum(case.layers)}"
    asked = [f"batch.micro={MICRO}", "compute.precision=fp32", f"plan.stages=[{stages}]"]
    loaded = load_config("debug", [*SETTINGS, model, *asked])
    return resolve(loaded, detect()).plan


def _making(case: Case, pipeline: PipelinePlan, seconds: Sequence[float]) -> Making:
    """Forward a third of a stage's time; whole backwards alone."""
    border = BorderTimes(transfer_s=case.border * max(seconds), is_shared=True)
    return Making(
        pipeline=pipeline,
        stages=[
            StageTimes(forward_s=s / 3, input_grad_s=s / 3, weight_grad_s=s / 3) for s in seconds
        ],
        borders=[border] * (len(seconds) - 1),
        room=(MICROBATCHES,) * len(seconds),
        names=("1f1b", "gpipe"),
    )


def _run(
    case: Case, out: Path, gbit: float, steps: int, plan: Plan
) -> tuple[float, tuple[float, ...]]:
    """Tokens a second of a run in the lab, and the part of the time in which each rank worked."""
    out.mkdir(parents=True)
    hosts = [
        {"name": f"h{number}", "chips": [{"kind": f"at-{speed:g}", "speed": speed}]}
        for number, speed in enumerate(case.speeds)
    ]
    cluster, file = out / "cluster.yaml", out / "plan.json"
    cluster.write_text(yaml.safe_dump({"hosts": hosts, "links": {"between": {"gbit": gbit}}}))
    file.write_text(plan.to_json())
    more = (f"model.num_layers={sum(case.layers)}", f"plan.file={file}", f"train.steps={steps}")
    words = ("train", "debug", *SETTINGS, *more, "checkpoint.every=0", "--quiet")
    said = run_weft(("lab", str(cluster), "--", "weft", *words, "--out", str(out / "run")))
    (used,) = re.findall(r"time after step 1 was used: (.+)", said)
    parts = tuple(float(part) / 100 for part in re.findall(r"rank \d+ (\d+)%", used))
    return tokens_per_s(out / "run", LOG_EVERY), parts


if __name__ == "__main__":
    main()
