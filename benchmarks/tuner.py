"""How many trials ``weft tune`` needs beside trying everything: ``python -m benchmarks.tuner``.

As root. In the lab of a cluster file all plans that ``weft tune`` would choose from are tried, each
beside the best so far; then its choices are played on what was measured: after how many trials it
has a plan within 2 % of the best, and what the best is beside the user's own plan, in turns. Goes
on with what an earlier start has left in its folder.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from weft.cli.target import load
from weft.cluster.cluster_file import read_cluster
from weft.data.prepare import prepare
from weft.platform.detect import detect
from weft.tune.job import Job, job_of
from weft.tune.record import Record
from weft.tune.trials import Best, Trials, ratio
from weft.tune.tuner import Outcome, Tuner

NEAR = 1.02
SEED = 1


def say(text: str) -> None:
    """To whoever waits."""
    print(text, file=sys.stderr, flush=True)


def best_of(tuner: Tuner) -> Best | None:
    """So far."""
    if tuner.best is None:
        return None
    outcome = next(o for o in tuner.ran if o.candidate == tuner.best)
    return Best(tuner.best, tuner.candidates[tuner.best], outcome)


def exhaust(job: Job, record: Record, folder: Path, minutes: float) -> bool:
    """Try what was not tried, in an order of chance; is nothing left?"""
    record.begin()
    if not record.candidates:
        own = [] if job.given is None else [job.candidate_of(job.given)]
        record.add_plans([*own, *job.space.candidates()], job.times, 0.0)
        say(f"{len(record.candidates)} plans")
    began = time.monotonic()
    tuner = Tuner(record.candidates, times=record.times, steps=1, outcomes=record.outcomes)
    order = list(range(len(record.candidates)))
    random.Random(SEED).shuffle(order)
    number = sum(1 for each in folder.iterdir() if each.is_dir())
    with Trials(job.setting(folder / f"trials{number}"), say) as trials:
        for candidate in order:
            late = time.monotonic() - began > 60 * minutes
            if candidate in {o.candidate for o in tuner.outcomes}:
                continue
            if late:
                return False
            found = trials.run(candidate, tuner.candidates[candidate], best_of(tuner))
            record.add(found, time.monotonic() - began)
            say(f"{len(tuner.outcomes)}: {found.step_s} {found.times:.3f} +- {found.within:.3f}")
        if not record.final and time.monotonic() - began < 60 * minutes:
            several = {o.candidate: o for o in sorted(tuner.ran, key=lambda o: o.step_s or 0)[:2]}
            several |= {
                o.candidate: o for o in tuner.ran if record.candidates[o.candidate].is_given
            }
            every = [Best(n, record.candidates[n], o) for n, o in several.items()]
            record.add_final(trials.final(every), time.monotonic() - began)
    return bool(record.final)


def replayed(record: Record) -> list[float]:
    """How much longer than the best of all the tuner's best takes after each of its trials."""
    measured: dict[int, Outcome] = {outcome.candidate: outcome for outcome in record.outcomes}
    best_s = min(outcome.step_s for outcome in record.outcomes if outcome.step_s is not None)
    own = [n for n, each in enumerate(record.candidates) if each.is_given]
    plans = [each for each in record.candidates if not each.is_given]
    tuner = Tuner(plans, times=record.times, steps=10**9)
    found = []
    while (number := tuner.next().candidate) is not None:
        known = measured[number + len(own)]
        tuner.outcomes.append(replace(known, candidate=number, against=None))
        found.append(tuner.best_s / best_s if tuner.ran else float("inf"))
    return found


def main() -> None:
    """Read what is asked for, try what is left, and print what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("values", nargs="*")
    parser.add_argument("--recipe", default="debug")
    parser.add_argument("--minutes", type=float, default=4.5)
    asked = parser.parse_args()
    loaded = load(asked.recipe, asked.values)
    lab = read_cluster(asked.cluster)
    job = job_of(loaded, asked.recipe, asked.values, lab, detect())
    prepare(job.config.data, job.config.seed, report=lambda *_: None)
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Record.opened(asked.out, job.asked)
    if not exhaust(job, record, asked.out, asked.minutes):
        say("there is more to try: start it again")
        return
    curve = replayed(record)
    near = next((n for n, times in enumerate(curve, start=1) if times <= NEAR), None)
    print(
        f"plans {len(record.candidates)}, that ran {len([o for o in record.outcomes if o.step_s])}"
    )
    print(f"trials until within 2 %: {near}; the curve: {[round(each, 3) for each in curve]}")
    first = record.final[0]
    for outcome in record.final:
        found = ratio(outcome.values, first.values)
        name = record.candidates[outcome.candidate].name
        print(f"{found.times:.3f} +- {found.within * found.times:.3f} times the best: {name}")


if __name__ == "__main__":
    main()
