"""Layers of experts of several ranks, in a lab: ``python -m benchmarks.experts`` (as root).

    python -m benchmarks.experts [--what ways]     # tokens go inside machines first, or all at once
    python -m benchmarks.experts --what hidden     # how much of an exchange is beside computing

``ways``: two machines of four ranks, joined by one link. ``hidden``: two machines of one rank each,
a layer with a shared expert; tokens are awaited at once, or beside what is computed, in one piece
or several. Beside them the same layer whose tokens need no link, so that the rest is the
exchange's. All ways take turns in one run, forward and backward of some layers each time; printed
are seconds of each, the medians, the least and the most, and what follows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weft.axes.ep.axis import AXIS
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.nn.experts.feed_forward import Experts
from weft.nn.experts.grouped import Visit
from weft.parallel.ep.exchange import COUNTS, Exchange
from weft.parallel.runtime import AxisGroup, Sum, squared
from weft.plan.layout import Dim
from weft.plan.model import ExpertsSpec

HOSTS = 2
LAYERS = 4
CHIPS = {"ways": 4, "hidden": 1}
PIECES = (1, 2, 4)


class NoLink(Comm):
    """From every other rank each gets zeros, as many as it has tokens for itself."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(rank=comm.rank)
        self.members = comm.members

    def exchange(
        self, parts: Sequence[Tensor], sizes: Sequence[Sequence[int]], *, name: str, **_: object
    ) -> Any:
        """Nothing is sent."""
        own = parts[self.rank]
        if name == COUNTS:
            return lambda: [own] * len(parts)
        found = [own.new_zeros(size) for size in sizes]
        found[self.rank] = own
        return lambda: found


class Awaited:
    """An exchange beside which nothing is computed."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, ends: Sequence[Tensor]) -> list[Visit]:
        """The same, there at once; backward too, for what is between them is nothing."""
        return [
            each._replace(there=partial(at_once, each.there), back=partial(at_once, each.back))
            for each in self._exchange(ends)
        ]


def at_once(way: Callable[[Tensor], Callable[[], Tensor]], x: Tensor) -> Callable[[], Tensor]:
    """Arrived."""
    there = way(x)()
    return lambda: there


def cluster(options: argparse.Namespace) -> str:
    """What ``weft lab`` is asked to build."""
    chips = ", ".join([f"{{kind: part, speed: {options.speed}}}"] * CHIPS[options.what])
    hosts = "".join(f"  - {{name: h{n}, chips: [{chips}]}}\n" for n in range(HOSTS))
    link = f"{{gbit: {options.gbit}, latency_ms: {options.latency_ms}}}"
    return f"hosts:\n{hosts}links:\n  between: {link}\n"


def layer(comm: Comm, options: argparse.Namespace, near: int = 1, pieces: int = 1) -> Experts:
    """With this rank's experts alone."""
    world = HOSTS * CHIPS[options.what]
    shared = options.shared_d_ff if options.what == "hidden" else None
    spec = ExpertsSpec(count=options.experts, top_k=options.top_k, shared_d_ff=shared)
    experts = Experts(options.d_model, options.d_ff, spec, seq_len=options.tokens)
    torch.manual_seed(0)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.02)
    count = Dim(name="experts", size=options.experts)
    parts = [AXIS.part(count, world, rank) for rank in range(world)]
    (own,) = parts[comm.rank]
    for name in ("gate", "up", "down"):
        part = experts.get_submodule(name)
        part.weight = torch.nn.Parameter(part.weight.data[own.start : own.stop].clone())
    group = AxisGroup(comm, tuple(range(world)), near_ways=near)
    experts.visits, experts.pieces = Exchange(Sum(group, (own,), tuple(parts), None)), pieces
    return experts


def contenders(comm: Comm, options: argparse.Namespace) -> dict[str, list[Experts]]:
    """Stacks of layers by what they are called."""

    def stack(comm: Comm, **how: int) -> list[Experts]:
        return [layer(comm, options, **how) for _ in range(LAYERS)]

    if options.what == "ways":
        chips = CHIPS["ways"]
        return {"at once": stack(comm), "inside machines first": stack(comm, near=chips)}
    found = {"without a link": stack(NoLink(comm)), "awaited": stack(comm)}
    for each in found["awaited"]:
        each.visits = Awaited(each.visits)
    return found | {f"beside, {many} pieces": stack(comm, pieces=many) for many in PIECES}


def timed(
    comm: Comm, stacks: Mapping[str, Sequence[Experts]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each turn."""
    x = torch.randn(2, options.tokens // 2, options.d_model, requires_grad=True)
    took: dict[str, list[float]] = {way: [] for way in stacks}
    for turn in range(options.turns + 1):
        for way, stack in stacks.items():
            comm.barrier(name="turn")
            begun = time.perf_counter()
            y = x
            for each in stack:
                y = y + each(y)[0]
            y.sum().backward()
            comm.barrier(name="turn")
            if turn:
                took[way].append(time.perf_counter() - begun)
    return took


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first prints."""
    address = RankAddress.from_environment()
    assert address is not None, "started by weft lab"
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    both = squared(comm.world, CHIPS[options.what])
    comm.open_groups(dict.fromkeys([comm.world, *(r for groups in both for r in groups)]))
    took = timed(comm, contenders(comm, options), options)
    if comm.rank == 0:
        medians = [median(seconds) for seconds in took.values()]
        for way, seconds in took.items():
            say(f"{way}: {median(seconds):.4f} s ({min(seconds):.4f} to {max(seconds):.4f})")
        if options.what == "ways":
            say(f"ratio: {medians[0] / medians[1]:.2f}")
        else:
            alone, awaited, *beside = medians
            for many, seconds in zip(PIECES, beside, strict=True):
                hidden = (awaited - seconds) / (awaited - alone)
                say(f"hidden in {many} pieces: {hidden:.0%} of {awaited - alone:.4f} s")
    comm.close()


def say(words: str) -> None:
    """A line, at once."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    """The lab, or one of its ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, usual in (("tokens", 64), ("d_model", 256), ("d_ff", 256), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--what", choices=CHIPS, default="ways")
    parser.add_argument("--top_k", type=int, default=2)
    parser.add_argument("--shared_d_ff", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--latency_ms", type=float, default=0.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster(options))
        lab = [sys.executable, "-m", "weft", "lab", str(file), "--out", str(Path(folder) / "out")]
        own = [sys.executable, "-m", "benchmarks.experts", *sys.argv[1:]]
        raise SystemExit(subprocess.run([*lab, "--", *own], check=False).returncode)


if __name__ == "__main__":
    main()
