"""Random clusters, and poorer ones beside each: what is planned for the richer is never slower.

A part of a cluster, a cluster with less memory or slower links, and a search with less effort all
bound the answer for the whole from above: chips may be left out.

``python -m benchmarks.poorer [--clusters 300] [--first SEED] [--nodes 2] [--each N]
[--effort PART] [--journal FILE] [--json]``. With a journal every cluster is one line of it, and
those that are there already are not planned again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Found, NoPlan, search
from weft.resolve.usual_precision import usual_precision

CHIPS = (
    "H100-SXM5-80GB",
    "A100-SXM4-80GB",
    "A100-SXM4-40GB",
    "V100-SXM2-32GB",
    "L40S",
    "A10",
    "T4",
    "RTX4090",
)
MODELS = "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b"
GBIT = 1, 1, 10, 25, 100, 400
AS_COMMANDS = Options(
    domains=True,
    mixed_recompute=True,
    in_flight=True,
    unlike_meshes=True,
    cuts_layers=True,
    divides_heads=True,
)
"""What commands leave open."""
Row = dict[str, Any]
SAME = 1e-6
"""Relative."""
MOST = 10
"""Sorts of poverty."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A cluster and a poorer one."""

    what: str
    """The poorer one has."""
    whole: Found | None
    """None where nothing fits."""
    poorer_s: float

    @property
    def worse(self) -> float:
        """Part by which the richer one's step is longer; 0 where it is not."""
        whole_s = seconds(self.whole)
        ratio = 0.0 if self.poorer_s == inf else whole_s / self.poorer_s - 1
        return ratio if ratio > SAME else 0.0


def drawn(seed: int, options: Options, *, most_nodes: int = 8, most_kinds: int = 4) -> Problem:
    """A job on several kinds of chip."""
    random = Random(seed)
    kinds, pools = catalogue(), []
    for name in random.sample(CHIPS, random.randint(1, most_kinds)):
        nodes, per_node = random.randint(1, most_nodes), random.choice([1, 2, 4, 8])
        gbit = random.choice(GBIT)
        pools.append(
            ChipPool(
                chip=kinds[name], num_nodes=nodes, chips_per_node=per_node, network_gbit_s=gbit
            )
        )
    workload = Workload(
        spec=SIZES[random.choice(MODELS)],
        seq_len=random.choice([1024, 2048, 4096]),
        samples=random.choice([32, 64, 128, 200, 256]),
        precision=usual_precision((pool.chip for pool in pools), cpu_bf16=False),
    )
    return Problem(workload, ClusterView(tuple(pools)), options=options)


def poorer(problem: Problem, random: Random) -> Iterator[tuple[str, Problem]]:
    """Without a kind of chip, or with fewer nodes or chips of it; with less of something, of all
    chips or of a kind; each kind of poverty once."""
    pools = problem.cluster.pools
    number = random.randrange(len(pools))
    before, pool, after = pools[:number], pools[number], pools[number + 1 :]
    name = pool.chip.name

    def with_other(other: ChipPool) -> Problem:
        return problem.on(ClusterView((*before, other, *after)))

    if len(pools) > 1:
        yield f"no {name}", problem.on(ClusterView((*before, *after)))
        alone = random.choice(pools)
        yield f"{alone.chip.name} alone", problem.on(ClusterView((alone,)))
    if pool.num_nodes > 1:
        fewer = random.randrange(1, pool.num_nodes)
        words = f"{fewer} of {pool.num_nodes} nodes of {name}"
        yield words, with_other(replace(pool, num_nodes=fewer))
    if pool.chips_per_node > 1:
        half = replace(pool, chips_per_node=pool.chips_per_node // 2)
        yield f"half the chips of each node of {name}", with_other(half)
    yield "0.8 of the memory", problem.with_memory(0.8)
    yield "half the network", problem.with_links(1.0, 0.5)
    less = replace(pool.chip, memory_gib=pool.chip.memory_gib * random.choice([0.5, 0.9]))
    yield f"{name} of {less.memory_gib:.4g} GiB", with_other(replace(pool, chip=less))
    slower = pool.network_bytes_s * 8e-9 * random.choice([0.1, 0.5, 0.9])
    words = f"{name} at {slower:.3g} Gbit/s"
    yield words, with_other(replace(pool, network_gbit_s=slower))
    yield "half the links in nodes", problem.with_links(0.5, 1.0)
    options = replace(problem.options, effort=problem.options.effort // 10)
    yield "a tenth of the effort", replace(problem, options=options)


def compared(whole: Problem, seed: int, each: int = MOST) -> Iterator[Compared]:
    """A cluster with poorer ones of all sorts, or with so many of them, drawn at random."""
    found = plan_for(whole)
    every = list(poorer(whole, Random(seed)))
    for what, other in Random(seed).sample(every, min(each, len(every))):
        yield Compared(what=what, whole=found, poorer_s=seconds(plan_for(other)))


def plan_for(problem: Problem) -> Found | None:
    """What is found, which takes no less than it is told to; None where nothing fits."""
    try:
        found = search(problem)
    except NoPlan:
        return None
    step_s = found.best.time.step_s
    assert found.bound_s <= step_s * (1 + SAME), (
        f"{found.bound_s} s, and {found.best.name} {step_s}"
    )
    return found


def seconds(found: Found | None) -> float:
    """Of a step; without end where nothing fits."""
    return found.best.time.step_s if found else inf


def looked_at(seed: int, most_nodes: int, each: int, part: float = 1.0) -> Row:
    """One cluster, and those beside it, with a part of the effort, as one line of a journal."""
    begin = perf_counter()
    options = replace(AS_COMMANDS, effort=int(AS_COMMANDS.effort * part))
    whole = drawn(seed, options, most_nodes=most_nodes)
    every, work = list(compared(whole, seed, each)), whole.workload
    found = every[0].whole
    pools = [
        f"{pool.num_nodes} x {pool.chips_per_node} {pool.chip.name} at "
        f"{pool.network_bytes_s * 8e-9:.3g} Gbit/s"
        for pool in whole.cluster.pools
    ]
    return {
        "seed": seed,
        "nodes": most_nodes,
        "each": each,
        "effort": part,
        "pools": pools,
        "chips": whole.cluster.world_size,
        "layers": work.spec.num_layers,
        "d_model": work.spec.d_model,
        "seq_len": work.seq_len,
        "samples": work.samples,
        "plan": found.best.name if found else None,
        "step_s": found.best.time.step_s if found else None,
        "gap": found.gap if found else None,
        "compared": [
            {
                "what": each.what,
                "step_s": None if each.poorer_s == inf else each.poorer_s,
                "worse": each.worse if each.worse < inf else None,
            }
            for each in every
        ],
        "seconds": perf_counter() - begin,
    }


def look(
    seeds: Sequence[int], most_nodes: int, each: int, part: float, journal: Path | None
) -> Iterator[Row]:
    """At these clusters, and say how far it is; what a journal holds is taken from it."""
    text = journal.read_text("utf-8") if journal and journal.exists() else ""
    rows = map(json.loads, text.splitlines())
    known = {
        (row["seed"], row["nodes"], row.get("each", MOST), row.get("effort", 1.0)): row
        for row in rows
    }
    worse = 0
    for number, seed in enumerate(seeds, start=1):
        row = known.get((seed, most_nodes, each, part))
        if row is None:
            row = looked_at(seed, most_nodes, each, part)
            if journal:
                with journal.open("a", encoding="utf-8") as lines:
                    print(json.dumps(row), file=lines)
        bad = [each for each in row["compared"] if each["worse"] != 0]
        worse += bool(bad)
        words = f"{number} of {len(seeds)} clusters, {worse} planned worse than a poorer one"
        print(f"seed {seed}: {row['seconds']:.0f} s; {words}", file=sys.stderr, flush=True)
        yield row


def told(rows: Sequence[Row]) -> Iterator[str]:
    """Every comparison in which the richer cluster's plan is slower, then how many."""
    number, worse, clusters = 0, list[float](), 0
    for row in rows:
        bad = [each for each in row["compared"] if each["worse"] != 0]
        number, clusters = number + len(row["compared"]), clusters + bool(bad)
        for each in bad:
            much = inf if each["worse"] is None else each["worse"]
            worse.append(much)
            whole = "no plan" if row["step_s"] is None else f"{row['step_s']:.4g} s"
            yield f"seed {row['seed']}, {each['what']}: {much:.1%}: {whole}, {each['step_s']:.4g} s"
    gaps = sorted(row["gap"] for row in rows if row["gap"] is not None)
    if gaps:
        words = f"{median(gaps):.1%} median, {gaps[int(0.9 * len(gaps))]:.1%} p90"
        yield f"bounds are {words}, {gaps[-1]:.1%} most below what was found"
    most = f"most {max(worse, default=0.0):.1%}"
    words = f"{len(rows)} clusters, {number} comparisons"
    yield f"{words}: {len(worse)} worse in {clusters} clusters, {most}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what is worse, or all as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.poorer", description=__doc__)
    parser.add_argument("--clusters", type=int, default=300, metavar="N", help="how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first cluster")
    parser.add_argument("--nodes", type=int, default=2, help="of a kind, at most: 8 take hours")
    parser.add_argument(
        "--each", type=int, default=MOST, metavar="N", help="poorer ones, at random"
    )
    parser.add_argument(
        "--effort", type=float, default=1.0, metavar="PART", help="of what a search may take"
    )
    parser.add_argument("--journal", type=Path, metavar="FILE", help="lines of JSON; goes on there")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.clusters)
    rows = list(look(seeds, asked.nodes, asked.each, asked.effort, asked.journal))
    print(json.dumps(rows, indent=2) if asked.json else "\n".join(told(rows)))


if __name__ == "__main__":
    main()
