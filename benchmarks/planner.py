"""How long the planner searches, and in how much memory: 10,000 chips of three kinds, 100,000 of
five, and 64.

``python -m benchmarks.planner [--json]``. Each search runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One search."""

    cluster: str
    """File in examples/clusters."""
    size: str
    seq_len: int
    samples: int
    seconds: float
    """That it may take."""


CASES = {
    "10k-chips": Case(
        cluster="mix-10k", size="llama3-405b", seq_len=8192, samples=2048, seconds=10.0
    ),
    "100k-chips": Case(
        cluster="mix-100k", size="llama3-405b", seq_len=8192, samples=8192, seconds=60.0
    ),
    "64-chips": Case(cluster="nodes-64", size="llama3-70b", seq_len=8192, samples=256, seconds=1.0),
}


def measure(name: str) -> dict[str, object]:
    """Search here, and say what it took."""
    import resource

    from weft.cluster.cluster_file import read_view
    from weft.models.llama.sizes import SIZES
    from weft.planner.problem import Options, Problem, Workload
    from weft.planner.search import search

    case = CASES[name]
    cluster = read_view(CLUSTERS / f"{case.cluster}.yaml")
    workload = Workload(spec=SIZES[case.size], seq_len=case.seq_len, samples=case.samples)
    begin = process_time()
    found = search(Problem(workload, cluster, options=Options(domains=True)))
    return {
        "seconds": found.seconds,
        "cpu_s": process_time() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "considered": found.considered,
        "simulated": found.simulated,
        "chips": cluster.world_size,
        "plan": found.best.name,
        "step_s": found.best.time.step_s,
    }


def rows() -> list[dict[str, object]]:
    """Every case, in the form of all benchmarks here."""
    result: list[dict[str, object]] = []
    for name, case in CASES.items():
        command = [sys.executable, "-m", "benchmarks.planner", "--one", name]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found = json.loads(run.stdout)
        row = {"name": name, "ours": found["seconds"], "theirs": {"limit": case.seconds}}
        ratio = case.seconds / found["seconds"]
        result.append({**row, "ratio": ratio, "unit": "s", "spread": None, "search": found})
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--one", choices=CASES, help="one search, in this process")
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(measure(asked.one)))
        return
    found = rows()
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        limit = row["theirs"]["limit"]
        print(f"{row['name']:>10}: {row['ours']:.2f} s, may take {limit:g} s: {row['search']}")


if __name__ == "__main__":
    main()
