"""The parity table on a library of collectives with NCCL's manners: does every plan get to its end?

    python -m benchmarks.strict [--seeds N] [--first SEED] [--queues Q ...] [--only NAME ...]
                                [--sample N] [--minutes M] [--chips]

Every plan of the table, with every seed (which of a rank's streams share a hardware queue, and how
long calls take) and every number of hardware queues: three steps in real processes, whose losses,
gradients and parameters must be those of one process. A deadlock, a mismatch of two calls, or
memory that somebody touches too early is printed with the places in the code and the command that
repeats it; the exit code is 1 then. The library is that of the tests (``tests/strict``); with
``--chips`` every rank is on the tests' fake chip, which checks the order of its streams too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool

TESTS = Path(__file__).parents[1] / "tests"
PROGRESS_S = 30.0


def parse() -> argparse.Namespace:
    """What the command was given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="of each plan and number of queues")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--queues", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", default=[], help="names of plans, or how they begin")
    parser.add_argument("--sample", type=int, help="only so many of these runs, drawn at random")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--chips", action="store_true", help="ranks on the fake chip of the tests")
    return parser.parse_args()


def main() -> int:
    """The exit code: 1 if a run failed."""
    arguments = parse()
    sys.path.append(str(TESTS))
    from parity.test_parity import TOLERANCE
    from strict.plans import CASES

    begun = told = time.monotonic()
    chosen = [n for n in CASES if not arguments.only or n.startswith(tuple(arguments.only))]
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    every = [(seed, queues, name) for seed in seeds for queues in arguments.queues
             for name in chosen]  # fmt: skip
    if arguments.sample is not None:
        every = Random(arguments.first).sample(every, min(arguments.sample, len(every)))
    done = failed = 0
    with WorkerPool() as pool:
        strict = _strict(pool, chips=arguments.chips)
        for seed, queues, name in every:
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
            try:
                found = strict.difference(CASES[name], queues=queues, seed=seed)
                problem = f"{found}" if found.largest >= TOLERANCE else ""
            except RanksFailedError as error:
                problem = str(error)
            done += 1
            if problem:
                failed += 1
                print(f"FAILED {name}, {queues} queues, seed {seed}: {problem}")
                print(f"  python -m benchmarks.strict --only {name} --queues {queues} "
                      f"--first {seed}{' --chips' * arguments.chips}", flush=True)  # fmt: skip
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                print(f"{done} of {len(every)} runs, {failed} failed, "
                      f"{told - begun:.0f} s", flush=True)  # fmt: skip
    seconds = time.monotonic() - begun
    print(f"{done} of {len(every)} runs ({len(chosen)} plans, {len(seeds)} seeds, queues "
          f"{arguments.queues}), {failed} failed, {seconds:.0f} s")  # fmt: skip
    return int(failed > 0)


def _strict(pool: WorkerPool, *, chips: bool) -> Any:
    from strict.plans import Strict

    if not chips:
        return Strict(pool)
    from chipb.build import built
    from chipb.chip import NAME, with_chips
    from chipb.strict_memory import on_chips

    built()
    return Strict(pool, on_chips, alone=with_chips, device=NAME)


if __name__ == "__main__":
    sys.exit(main())
