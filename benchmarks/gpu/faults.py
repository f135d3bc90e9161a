"""What goes wrong on purpose: every rank ends within half a minute, and says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.part import DisprovedError, Found, Here, Part
from benchmarks.gpu.speed import ALWAYS, weft

WITHIN_S = 30.0
START_S = 240.0
SIZES = (
    "model.size=debug-1m",
    "data.vocab_size=1024",
    "data.seq_len=128",
    "compute.threads=1",
    "compute.compile=false",
)


class Job:
    """``weft train`` in the background."""

    def __init__(self, here: Here, name: str, ranks: int, settings: Sequence[str]) -> None:
        self.out = here.folder / name
        arguments = [
            "train", "debug", *ALWAYS, *SIZES, f"compute.device={here.device}",
            f"data.cache_dir={here.folder / 'cache'}", f"plan.shares={[1] * ranks}",
            "data.workers=0", *settings, "--out", str(self.out),
        ]  # fmt: skip
        self.said = here.folder / f"{name}.txt"
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", *arguments], stdout=log, stderr=log
            )

    def until_step(self, step: int) -> None:
        """Raises DisprovedError where it ends before, or takes too long."""
        end, metrics = time.monotonic() + START_S, self.out / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            if self.process.poll() is not None or time.monotonic() > end:
                raise DisprovedError(f"no step {step}: {self.last_words()}")
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Their numbers among processes: the children of the command's fork server."""
        return [rank for child in _children(self.process.pid) for rank in _children(child)]

    def ends(self) -> float:
        """Seconds until the command and all its ranks are gone."""
        ranks, begun = self.ranks(), time.monotonic()
        self.process.wait(START_S)
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            time.sleep(0.02)
            if time.monotonic() - begun > START_S:
                raise DisprovedError(f"ranks stay: {ranks}")
        return time.monotonic() - begun

    def last_words(self) -> str:
        lines = [line for line in self.said.read_text("utf-8").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error")]
        return (errors or lines or [""])[0][:300]


def _children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in file.read_text().split()] if file.exists() else []


def _told(found: Found, what: str, job: Job, seconds: float, *, cause: str, code: int) -> None:
    found.measures(f"{what}, s until all are gone", seconds)
    words, ended = job.last_words(), job.process.returncode
    found.proves(f"{what}: ends in time", holds=seconds < WITHIN_S)
    found.proves(f"{what}: exit code {ended}, {words!r}", holds=ended == code and cause in words)


def _faults(ranks: int) -> Callable[[Here, Found], None]:
    def faults(here: Here, found: Found) -> None:
        many = max(ranks, 2 if here.is_host else ranks)
        long = ("train.steps=100000", "batch.samples=4", "batch.micro=1")
        job = Job(here, "not-a-number", many, (*long, "optim.lr=1e30", "optim.max_grad_norm=null"))
        job.until_step(1)
        _told(found, "numbers that are none", job, job.ends(), cause="diverged", code=76)
        alone = (*long, "recovery.restarts=0")
        job = Job(here, "killed", many, alone)
        job.until_step(3)
        os.kill(job.ranks()[-1], signal.SIGKILL)
        _told(found, "a rank is killed", job, job.ends(), cause="SIGKILL", code=1)
        job = Job(here, "asked", many, (*long, "checkpoint.every=5"))
        job.until_step(7)
        job.process.terminate()
        seconds = job.ends()
        found.measures("asked to stop, s until all are gone", seconds)
        found.proves("asked to stop: saves and ends in time", holds=seconds < WITHIN_S)
        saved = sorted((job.out / "checkpoints").glob("step-*"))
        found.proves(f"asked to stop: {len(saved)} checkpoints", holds=bool(saved))
        job = Job(here, "in-a-save", many, (*alone, "checkpoint.every=1"))
        job.until_step(4)
        for rank in job.ranks():
            os.kill(rank, signal.SIGKILL)
        job.ends()
        done = weft(here, "checkpoint", "verify", str(job.out), "--json")
        words = f"killed while it saves: what is left is sound {done.stdout.strip()[:80]}"
        found.proves(words, holds=done.returncode == 0)
        if here.is_host:
            found.measures("a full card", "there is none")
            return
        full = ("model.size=llama2-70b", "compute.check_memory=false")
        job = Job(here, "full", many, (*full, f"batch.samples={many}", "batch.micro=1"))
        _told(found, "a full card", job, job.ends(), cause="too little memory", code=1)

    return faults


def exposed(here: Here, found: Found) -> None:
    """What ranks wait for in a step, by traces of ``weft train --profile``."""
    done = weft(
        here, "train", "debug", *ALWAYS, *SIZES, f"compute.device={here.device}",
        "plan.shares=[1,1]",
        f"data.cache_dir={here.folder / 'cache'}", "batch.samples=8", "batch.micro=2",
        "train.steps=8", "--profile", "--json", "--out", str(here.folder / "profiled"),
    )  # fmt: skip
    found.proves("a profiled run ends", holds=done.returncode == 0)
    for rank in json.loads(done.stdout)["profile"]["ranks"]:
        part = sum(rank["waits_s"].values()) / rank["step_s"]
        found.measures(f"rank {rank['rank']}, of a step waiting for others", f"{part:.1%}")
    traces = list((here.folder / "profiled" / "profile").glob("*.json.gz"))
    found.proves(f"{len(traces)} traces", holds=len(traces) == 2)


PARTS = (
    Part(name="faults", asks="every rank ends within 30 s and says why", run=_faults(1), minutes=8),
    Part(name="faults-many", asks="the same of two cards", run=_faults(2), minutes=8, devices=2),
    Part(name="exposed", asks="what two cards wait for", run=exposed, minutes=4, devices=2),
)  # fmt: skip
