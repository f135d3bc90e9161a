"""Whether training survives: ``python -m benchmarks.chaos --faults 200 --seed 1``.

Real runs of a small model in real processes. Faults are drawn from a seed and happen by appointment
in every phase of a rank's life and of a step; what they meet is ``weft train`` as anybody starts
it. After each run its losses must be, bit for bit, those of a run without faults; every checkpoint
that is left must be whole; no process may be left; and with a copy in memory after every step, at
most one step may be done again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, get_args

from benchmarks.chaos.faults import ALL_KINDS, FIRED, STEPS, Fault, Kind, agents, drawn, write
from weft.checkpoint.verify import verify

ASKED = [
    *["debug", "--quiet", "compute.device=cpu", "compute.threads=1", "data.workers=0"],
    *["batch.samples=4", "batch.micro=1", "data.seq_len=32", "train.eval_every=0"],
    *["checkpoint.every=4", "checkpoint.snapshot_every=1", "recovery.heartbeat_s=8"],
    *["metrics.tensorboard=false", "metrics.report=false", "sample.prompts=[]"],
]
PLANS = {
    "dp2": (2, ["plan.shares=[2,2]"]),
    "pp2": (2, ["plan.stages=[{layers: 1}, {}]"]),
    "dp2-pp2": (4, ["plan.stages=[{layers: 1, dp: 2}, {dp: 2}]", "batch.micro=2"]),
}
EVERY = 8
"""Steps from one fault to the next."""
PER_RUN = 12
STEPS_IN_ALL = (EVERY + 4) * (PER_RUN + 2)
LIMIT_S = 60.0
LOOK_S = 0.02
LAUNCH = "benchmarks.chaos.launch"
"""The command: a folder with appointments, and words of ``weft train``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault."""

    plan: str
    fault: Fault
    next_step_s: float
    """Until a step was finished that was not before."""
    lost: int
    """Steps that were finished before, and had to be done again."""


class UnwellError(Exception):
    """Training did not survive, or not as it should."""


class Process(Protocol):
    """What is asked of a command that was started."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


@contextmanager
def started(words: Sequence[str], log: Path) -> Iterator[Process]:
    """``benchmarks.chaos.launch`` in a session of its own, as a shell starts it."""
    command = [sys.executable, "-m", LAUNCH, *words]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        yield process


Start = Callable[[Sequence[str], Path], AbstractContextManager[Process]]


def survive(
    folder: Path,
    plan: str,
    faults: Sequence[Fault],
    *,
    limit_s: float = LIMIT_S,
    start: Start = started,
) -> list[Outcome]:
    """One run, and what became of its faults; the command is given again as often as all ended.

    ``limit_s``: most seconds from one finished step to the next, whatever happens. ``start`` gives
    the command, with these words and what it prints in that file.
    """
    write(folder, faults)
    last = max(fault.step for fault in faults) + EVERY
    words = [str(folder), *ASKED, *PLANS[plan][1], f"train.steps={STEPS_IN_ALL}"]
    words += ["--steps", str(last), "--out", str(folder / "run")]
    ends = [fault for fault in faults if fault.ends_all]
    for number in range(3 * len(ends) + 1):
        log = folder / f"start{number}.txt"
        with start(words, log) as process:
            _watch(folder, process, log, limit_s)
        code, said = process.returncode or 0, log.read_text()
        if code == 0:
            break
        damaged = _refused(folder, said) if code > 0 else None
        if code > 0 and damaged is None:
            raise UnwellError(f"ended with code {code}: {said[-2000:]}")
        if damaged is not None:
            shutil.rmtree(damaged)  # as the error said
    else:
        raise UnwellError(f"started {number + 1} times for {len(ends)} faults that end all")
    return _checked(folder, plan, faults)


def _watch(folder: Path, process: Process, log: Path, limit_s: float) -> None:
    """Until it has ended; what does no step for so long is ended."""
    moved = time.monotonic()
    seen = -1
    while process.poll() is None:
        time.sleep(LOOK_S)
        size = sum(each.stat().st_size for each in (folder / STEPS).glob("*"))
        if size != seen:
            seen, moved = size, time.monotonic()
        if time.monotonic() > moved + limit_s:
            process.kill()
            raise UnwellError(f"no step in {limit_s:g} s: {log.read_text()[-2000:]}")


def _refused(folder: Path, said: str) -> Path | None:
    """What a start would not go on from, and told a person to remove; None: it said otherwise."""
    root = folder / "run" / "checkpoints"
    if f"Remove {root} to begin" in said:
        return root
    for checkpoint in root.glob("step*"):
        if checkpoint.name in said and "Without" in said:
            return checkpoint
    return None


def _checked(folder: Path, plan: str, faults: Sequence[Fault]) -> list[Outcome]:
    for problem in verify(folder / "run" / "checkpoints").problems:
        raise UnwellError(f"a checkpoint is not whole: {problem}")
    deadline = time.monotonic() + LIMIT_S
    while agents(folder):
        time.sleep(LOOK_S)
        if time.monotonic() > deadline:
            raise UnwellError(f"agents are left: {agents(folder)}")
    outcomes = [_outcome(folder, plan, fault) for fault in faults]
    for outcome in outcomes:
        fault = outcome.fault
        first = faults[fault.after] if fault.after >= 0 else fault
        if outcome.lost > 1 and not first.forgets:
            raise UnwellError(f"{outcome.lost} steps were done again: {fault}")
    return outcomes


def _outcome(folder: Path, plan: str, fault: Fault) -> Outcome:
    """As the rank saw it that the fault was in."""
    file = folder / FIRED / str(fault.number)
    if not file.exists():
        raise UnwellError(f"never happened: {fault}")
    at = json.loads(file.read_text())["at"]
    lines = (folder / STEPS / f"{fault.rank}.jsonl").read_text().splitlines()
    rows = [(when, step) for when, step, _ in map(json.loads, lines)]
    before = max((step for when, step in rows if when <= at), default=0)
    new = min((when for when, step in rows if when > at and step > before), default=at)
    again = [step for when, step in rows if at < when < new]
    return Outcome(plan, fault, new - at, before + 1 - min(again, default=before + 1))


def losses(folder: Path) -> dict[int, float]:
    """By step."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def compare(found: dict[int, float], expected: dict[int, float]) -> None:
    """Bit for bit, as far as the shorter run went."""
    if sorted(found) != list(range(1, len(found) + 1)):
        raise UnwellError(f"steps are missing of {len(found)}: {sorted(found)}")
    for step, loss in found.items():
        if loss != expected[step]:
            raise UnwellError(f"step {step}: loss {loss!r}, without faults {expected[step]!r}")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """By what was done, and when."""
    by: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by[outcome.fault.kind, outcome.fault.moment].append(outcome)
    lines = ["fault     moment       times  steps lost  to the next step: median   most"]
    for (kind, moment), those in sorted(by.items()):
        seconds = [outcome.next_step_s for outcome in those]
        lost = max(outcome.lost for outcome in those)
        lines.append(
            f"{kind:<9} {moment:<12} {len(those):>5} {lost:>11} "
            f"{statistics.median(seconds):>23.2f} s {max(seconds):>5.2f} s"
        )
    return lines


def main() -> None:
    """Print what became of every kind of fault; exit code 1 where training did not survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=ALL_KINDS)
    parser.add_argument("--json", action="store_true", help="print every outcome as JSON")
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="weft-chaos-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    expected: dict[str, dict[int, float]] = {}
    outcomes: list[Outcome] = []
    number = 0
    while len(outcomes) < asked.faults:
        plan = asked.plans[number % len(asked.plans)]
        if plan not in expected:
            expected[plan] = _without_faults(home / plan, plan)
        count = min(PER_RUN, asked.faults - len(outcomes))
        seed, ranks = 1000 * asked.seed + number, PLANS[plan][0]
        faults = drawn(seed, count, ranks=ranks, every=EVERY, kinds=asked.kinds)
        folder = home / f"run{number}"
        folder.mkdir()
        began = time.monotonic()
        try:
            found = survive(folder, plan, faults)
            compare(losses(folder), expected[plan])
        except UnwellError as error:
            sys.exit(f"{folder}: {plan}: {error}\n{json.dumps([asdict(each) for each in faults])}")
        outcomes += found
        print(
            f"run {number}, {plan}: {len(found)} faults survived in "
            f"{time.monotonic() - began:.0f} s, {len(outcomes)} of {asked.faults}",
            file=sys.stderr,
            flush=True,
        )
        number += 1
        with suppress(OSError):
            shutil.rmtree(folder)
    shutil.rmtree(home)
    if asked.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        print(*table(outcomes), sep="\n")


def _without_faults(folder: Path, plan: str) -> dict[int, float]:
    folder.mkdir()
    survive(folder, plan, [Fault(0, "slow", "forward", 0, STEPS_IN_ALL - 2 * EVERY)])
    return losses(folder)


if __name__ == "__main__":
    main()
