"""Predicted against measured on this machine: real jobs of unlike plans, by the machine's profile.

    python -m benchmarks.real_plans [--out DIR] [--profile FILE] [--only NAME] [--json]

The profile comes first (``weft chips profile``), then every run is predicted before it starts and
measured while it trains; nothing that a run shows enters the profile. Step time is the median
after the first steps. A shared machine is now faster, now slower than when it was profiled:
before and after each run the small real job that the profile was fitted to is timed again, on as
many ranks, and errors are told as they are and beside the machine as it was then. Memory is the
most that a rank had resident (peak RSS): what the kernel counts when it decides whom to end. A
folder that holds some of the runs is gone on with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.cost.profile_file import saved_profiles
from weft.elastic.chip_profile import WHOLE, predicted_s, real_steps
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.platform.detect import detect_node

STEPS = 9
PACE, PACE_STEPS = "pace.json", 4
TIMEOUT_S = 300.0
SMALL = ("model.size=demo-5m", "data.seq_len=256", "batch.samples=8")
WIDE = (
    "model.size=demo-5m",
    "model.d_model=384",
    "model.d_ff=1024",
    "model.num_heads=6",
    "model.num_kv_heads=3",
    "model.num_layers=6",
    "data.seq_len=512",
    "batch.samples=4",
)
GPT2 = ("model.family=gpt2", "model.size=demo-5m", "data.seq_len=256", "batch.samples=8")
ALONE = "plan.shares=[1]"
LONG = ("model.size=demo-5m", "data.seq_len=1024", "batch.samples=2")
ALWAYS = (
    "data.vocab_size=4096",
    "data.path=builtin:python",
    "data.limit_mb=4",
    f"train.steps={STEPS}",
    "train.eval_samples=1",
    "train.log_every=1",
    "checkpoint.every=0",
    "checkpoint.minutes=0",
    "sample.prompts=[]",
    "metrics.report=false",
    "metrics.tensorboard=false",
    "compute.threads=1",
    "compute.precision=fp32",
    "compute.device=cpu",
)

PLANS: dict[str, tuple[str, ...]] = {
    "one rank": (*SMALL, ALONE, "batch.micro=2"),
    "one rank, recompute": (*SMALL, ALONE, "batch.micro=4", "compute.recompute=full"),
    "one rank, wide": (*WIDE, ALONE, "batch.micro=2"),
    "one rank, GPT-2": (*GPT2, ALONE, "batch.micro=4"),
    "one rank, long": (*LONG, ALONE, "batch.micro=1"),
    "dp 2": (*SMALL, "batch.micro=2", "plan.shares=[1, 1]"),
    "dp 2, ZeRO 1": (*SMALL, "batch.micro=4", "plan.stages=[{dp: 2, zero: 1}]"),
    "dp 2, ZeRO 2, wide": (*WIDE, "batch.micro=2", "plan.stages=[{dp: 2, zero: 2}]"),
    "dp 2, ZeRO 3, wide": (*WIDE, "batch.micro=2", "plan.stages=[{dp: 2, zero: 3}]"),
    "tp 2": (*SMALL, "batch.micro=4", "plan.stages=[{tp: 2}]"),
    "tp 2, wide": (*WIDE, "batch.micro=2", "plan.stages=[{tp: 2}]"),
    "pp 2, GPipe": (*SMALL, "batch.micro=1", "plan.stages=[{}, {}]", "plan.schedule=gpipe"),
    "pp 2, 1F1B, 4 and 2 layers": (
        *WIDE,
        "batch.micro=1",
        "plan.stages=[{layers: 4}, {layers: 2}]",
        "plan.schedule=1f1b",
    ),
    "pp 2, ZB-H1, 3 and 1 layers": (
        *SMALL,
        "batch.micro=2",
        "plan.stages=[{layers: 3}, {layers: 1}]",
        "plan.schedule=zb-h1",
    ),
    "pp 2, interleaved": (
        *SMALL,
        "batch.micro=2",
        "plan.stages=[{}, {}]",
        "plan.schedule=interleaved",
    ),
    "pipelines of 5 and 3 samples": (
        *SMALL,
        "batch.micro=1",
        "plan.pipelines=[{share: 5, micro: 2, stages: [{}]},"
        " {share: 3, micro: 1, stages: [{recompute: full}]}]",
    ),
    "one rank, two modes": (*SMALL, ALONE, "batch.micro=4", "compute.recompute=feed_forward+core"),
    "shares of 3 and 1": (*SMALL, "batch.micro=2", "plan.shares=[3, 1]"),
    "dp 2, ZeRO 3": (*SMALL, "batch.micro=4", "plan.stages=[{dp: 2, zero: 3}]"),
    "cp 2, long": (*LONG, "batch.micro=1", "plan.stages=[{cp: 2}]"),
    "pp 2, ZB-V": (*SMALL, "batch.micro=2", "plan.stages=[{}, {}]", "plan.schedule=zb-v"),
    "pp 2, DualPipeV": (
        *SMALL,
        "batch.micro=1",
        "plan.stages=[{}, {}]",
        "plan.schedule=dualpipe-v",
    ),
    "pp 2, a border inside a layer": (
        *SMALL,
        "batch.micro=2",
        "plan.stages=[{layers: 2.5}, {layers: 1.5}]",
        "plan.schedule=1f1b",
    ),
    "pp 2, the first recomputes": (
        *SMALL,
        "batch.micro=1",
        "plan.stages=[{recompute: full}, {}]",
        "plan.schedule=1f1b",
    ),
}


@dataclass(frozen=True)
class Row:
    """One plan, before and after."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_gib: tuple[float, ...]
    measured_gib: tuple[float, ...]
    pace: float
    """How many times as long as by the profile a job took that is not the plan's, in the same
    minute."""

    @property
    def raw_error(self) -> float:
        """Part of the measured step time; negative where it was predicted too short."""
        return self.predicted_s / self.measured_s - 1

    @property
    def time_error(self) -> float:
        """Likewise, of the machine as it was."""
        return self.predicted_s * self.pace / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Of the rank that is furthest off."""
        pairs = zip(self.predicted_gib, self.measured_gib, strict=True)
        return max((before / after - 1 for before, after in pairs), key=abs)


def environment(out: Path) -> dict[str, str]:
    """Profiles of this measurement alone, one thread a rank."""
    return {**os.environ, "WEFT_PROFILES": str(out / "profiles"), "OMP_NUM_THREADS": "1"}


def weft(out: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> None:
    """Run a command of Weft; what it says goes to a log."""
    with (out / "log.txt").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "weft", *arguments],
            env=environment(out),
            stdout=log,
            stderr=log,
            timeout=timeout_s,
            check=True,
        )


def profile(out: Path, given: Path | None) -> None:
    """The profile of this machine, measured now unless there is one."""
    folder = out / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    if given is not None:
        (folder / given.name).write_bytes(given.read_bytes())
    elif not list(folder.glob("*.json")):
        weft(out, "chips", "profile", "--device", "cpu", timeout_s=600)


class Pace:
    """How long the job takes to which the profile of this machine was fitted."""

    def __init__(self, out: Path, pool: WorkerPool) -> None:
        self._pool, self._node = pool, detect_node()
        ((_, self._profile),) = saved_profiles(out / "profiles")

    def now(self, ranks: int) -> float:
        """Beside what the profile says; ``ranks`` replicas of it."""
        sample = replace(WHOLE, mesh=Mesh.of(tuple(range(ranks)), dp=ranks))
        took = self._pool.run(real_steps, "cpu", sample, PACE_STEPS, world_size=ranks)
        return max(took) / predicted_s(self._profile, self._node, sample)


def measure(out: Path, name: str, pace: Pace) -> Row:
    """Run one plan, unless that was done before."""
    folder = out / name.replace(" ", "-").replace(",", "")
    if not (folder / PACE).exists():
        cache = f"data.cache_dir={out / 'cache'}"
        ranks = 1 if name.startswith("one rank") else 2
        if folder.exists():  # cut off before its pace was known
            shutil.rmtree(folder)
        before = pace.now(ranks)
        weft(out, "train", "debug", *ALWAYS, *PLANS[name], cache, "--out", str(folder), "--quiet")
        both_paces = before, pace.now(ranks)
        (folder / PACE).write_text(json.dumps(both_paces))
    both = json.loads((folder / "summary.json").read_text("utf-8"))["prediction"]
    before, after = both["predicted"], both["measured"]
    return Row(
        name=name,
        predicted_s=before["step_time_s"],
        measured_s=after["step_time_s"],
        predicted_gib=tuple(before["memory_gib"]),
        measured_gib=tuple(after["memory_gib"]),
        pace=statistics.mean(json.loads((folder / PACE).read_text("utf-8"))),
    )


def told(row: Row) -> str:
    """In a line."""
    memory = " ".join(
        f"{before:.2f}/{after:.2f}"
        for before, after in zip(row.predicted_gib, row.measured_gib, strict=True)
    )
    return (
        f"{row.name:30} {row.predicted_s:7.3f} s, took {row.measured_s:7.3f} s"
        f" ({row.raw_error:+.1%}; {row.time_error:+.1%} at its pace of {row.pace:.3f}); "
        f"memory {memory} GiB ({row.memory_error:+.1%})"
    )


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """The schema that every benchmark prints."""
    records = []
    every = {"time": "time_error", "time by the clock": "raw_error", "memory": "memory_error"}
    for what, key in every.items():
        errors = {row.name: getattr(row, key) for row in rows}
        sizes = sorted(abs(error) for error in errors.values())
        records.append(
            {
                "name": f"real plans: {what}",
                "ours": statistics.median(sizes),
                "theirs": {},
                "ratio": None,
                "unit": "relative error",
                "spread": sizes[-1],
                "errors": errors,
            }
        )
    return records


def main() -> None:
    """Profile, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".weft/real-plans"))
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--only", choices=PLANS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    profile(out, options.profile)
    names = [options.only] if options.only else list(PLANS)
    rows = []
    with WorkerPool() as pool:
        pace = Pace(out, pool)
        for name in names:
            rows.append(measure(out, name, pace))
            if not options.json:
                print(told(rows[-1]), flush=True)
    records = summary(rows)
    if options.json:
        print(json.dumps(records, indent=2))
        return
    for record in records:
        print(f"{record['name']}: median {record['ours']:.1%}, worst {record['spread']:.1%}")


if __name__ == "__main__":
    main()
