"""A step of layers of experts whose tokens go inside machines first, beside one in which all go at
once: ``python -m benchmarks.experts`` (as root, for ``weft lab``).

Two machines of four ranks, joined by one link. Both ways take turns in one run, forward and
backward of some layers each time; printed are seconds of each and their ratio, of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from weft.axes.ep.axis import AXIS
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.nn.experts.feed_forward import Experts
from weft.parallel.ep.exchange import Exchange
from weft.parallel.runtime import AxisGroup, Sum, squared
from weft.plan.layout import Dim
from weft.plan.model import ExpertsSpec

HOSTS, CHIPS = 2, 4
WORLD = HOSTS * CHIPS
WAYS = {"at once": 1, "inside machines first": CHIPS}
LAYERS = 4


def cluster(speed: float, gbit: float) -> str:
    """What ``weft lab`` is asked to build."""
    chips = ", ".join([f"{{kind: part, speed: {speed}}}"] * CHIPS)
    hosts = "".join(f"  - {{name: h{n}, chips: [{chips}]}}\n" for n in range(HOSTS))
    return f"hosts:\n{hosts}links:\n  between: {{gbit: {gbit}}}\n"


def layer(comm: Comm, options: argparse.Namespace, near: int) -> Experts:
    """With this rank's experts alone."""
    spec = ExpertsSpec(count=options.experts, top_k=options.top_k)
    experts = Experts(options.d_model, options.d_ff, spec)
    torch.manual_seed(0)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.02)
    count = Dim(name="experts", size=options.experts)
    parts = [AXIS.part(count, WORLD, rank) for rank in range(WORLD)]
    (own,) = parts[comm.rank]
    for name in ("gate", "up", "down"):
        part = experts.get_submodule(name)
        part.weight = torch.nn.Parameter(part.weight.data[own.start : own.stop].clone())
    group = AxisGroup(comm, tuple(range(WORLD)), near_ways=near)
    experts.visit = Exchange(Sum(group, (own,), tuple(parts), None))
    return experts


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first prints."""
    address = RankAddress.from_environment()
    assert address is not None, "started by weft lab"
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    every = tuple(range(WORLD))
    comm.open_groups(dict.fromkeys([every, *(r for both in squared(every, CHIPS) for r in both)]))
    layers = {
        way: [layer(comm, options, near) for _ in range(LAYERS)] for way, near in WAYS.items()
    }
    x = torch.randn(1, options.tokens, options.d_model, requires_grad=True)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.turns + 1):
        for way, stack in layers.items():
            comm.barrier(name="turn")
            begun = time.perf_counter()
            y = x
            for each in stack:
                y = y + each(y)[0]
            y.sum().backward()
            comm.barrier(name="turn")
            if turn:
                took[way].append(time.perf_counter() - begun)
    if comm.rank == 0:
        medians = [statistics.median(seconds) for seconds in took.values()]
        for way, seconds in took.items():
            least, most = min(seconds), max(seconds)
            sys.stdout.write(
                f"{way}: {statistics.median(seconds):.4f} s ({least:.4f} to {most:.4f})\n"
            )
        sys.stdout.write(f"ratio: {medians[0] / medians[1]:.2f}\n")
    comm.close()


def main() -> None:
    """The lab, or one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("tokens", 64), ("d_model", 256), ("d_ff", 256), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--top_k", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument("--gbit", type=float, default=1.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster(options.speed, options.gbit))
        lab = [sys.executable, "-m", "weft", "lab", str(file), "--out", str(Path(folder) / "out")]
        own = [sys.executable, "-m", "benchmarks.experts", *sys.argv[1:]]
        raise SystemExit(subprocess.run([*lab, "--", *own], check=False).returncode)


if __name__ == "__main__":
    main()
