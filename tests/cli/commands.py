"""Real ``weft train`` commands for tests: tiny runs, started, watched, and ended by process id."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cli.warm import WarmProcess

from weft.checkpoint.agent.client import AGENT

COLD = (sys.executable, "-m", "weft")
"""Weft as a shell starts it."""

TIMEOUT_S = 600.0
"""For whatever is waited for, on a machine that may be very busy."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

CONFIG = """\
extends: debug
name: tiny
model: {d_model: 32, d_ff: 64, d_head: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2}
data: {path: text.txt, tokenizer: bytes, seq_len: 64, held_out: 0.1}
batch: {samples: 24, micro: 2}
compute: {device: cpu, precision: fp32, threads: 1}
train: {steps: 30, eval_every: 7, eval_samples: 8, log_every: 1}
checkpoint: {every: 3, keep: 2}
sample: {prompts: [a], tokens: 4}
"""
"""tiny.yaml: two processes with shares 2:1; steps long enough to be caught in the middle."""


def complaints(log: Path) -> list[str]:
    """What a rank says that is wrong; that a save was late only tells of a busy machine."""
    return [line for line in log.read_text().splitlines() if "still being written" not in line]


def write_inputs(folder: Path) -> None:
    """tiny.yaml and text.txt."""
    words = random.Random(5)
    text = [" ".join(words.choices("abcdefgh", k=60)) for _ in range(150)]
    (folder / "text.txt").write_text("\n\n".join(text))
    (folder / "tiny.yaml").write_text(CONFIG)


@dataclass(frozen=True)
class Command:
    """A command that runs in a session of its own."""

    process: subprocess.Popen[str] | WarmProcess
    out: Path
    """The run folder."""

    def finish(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def alive(self) -> list[int]:
        """Every process of the session: the command, its ranks, and theirs."""
        return [pid for pid in _pids() if _session(pid) == self.process.pid]

    def interruptible(self) -> list[int]:
        """Those of its processes that SIGINT would reach."""
        return [pid for pid in self.alive() if not _deaf(pid, signal.SIGINT)]

    def rank(self, number: int) -> int:
        """Process id of a rank above 0, which prints to a log of its own."""
        first = self._of_rank(number)
        assert first, f"there is no rank {number}"
        return first[0]

    def _of_rank(self, number: int) -> list[int]:
        log = str((self.out / f"logs/rank{number}.log").resolve())
        found = [pid for pid in self.alive() if stdout(pid) == log]
        return [pid for pid in found if parent(pid) not in found]  # not what it just started

    def loaders(self, number: int) -> list[int]:
        """Process ids of those that make the batches of a rank above 0."""
        served = {pid for pid in self.alive() if parent(pid) in self._of_rank(number)}
        return [pid for pid in self.alive() if parent(pid) in served]

    def ranks(self) -> dict[int, int]:
        """Process ids of both ranks."""
        found: dict[int, int] = {}

        def are_both_there() -> bool:
            for other in self._of_rank(1):
                served = {pid for pid in self.alive() if parent(pid) == parent(other)} - {other}
                if len(served) == 1:
                    found.update({0: served.pop(), 1: other})
            return bool(found)

        self.wait_until(are_both_there)
        return found

    def agents(self) -> list[int]:
        """Process ids of those that write its checkpoints, in sessions of their own."""
        logs = {str(path.resolve()) for path in self.out.glob("logs/agent*.log")}
        return [pid for pid in _pids() if stdout(pid) in logs and _session(pid) is not None]

    def kill_ranks(self) -> None:
        """The command and all of its ranks, and nothing else."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """What a machine that goes down does."""
        self.kill_ranks()
        _kill(self.agents())

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: step in [record["step"] for record in steps(self.out)])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended before: {self.finish()}"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.002)

    def is_gone(self) -> bool:
        """Nothing is left of the session, or soon is not."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.alive()


@contextmanager
def started(
    folder: Path,
    out: str,
    *arguments: str,
    program: Sequence[str] = (),
    module: str = "weft",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Command]:
    """``weft train tiny.yaml --out OUT ...`` in ``folder``; nothing of it is left afterwards.

    Args:
        program: What to start as a new process; by default ``module`` is forked from a warm one.
    """
    words = ["train", "tiny.yaml", "--out", out, *arguments]
    variables = ENVIRONMENT | dict(environment or {})
    start = partial(_new, program) if program else partial(WarmProcess, module=module)
    command = Command(start(words, folder, variables), folder / out)
    try:
        yield command
    finally:
        _kill(command.alive() + command.agents())
        command.process.communicate()


def _new(
    program: Sequence[str], words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def has_begun(agent: int) -> bool:
    """It runs its own program: before that, whoever started it waits for it."""
    try:
        return AGENT in Path(f"/proc/{agent}/cmdline").read_text().split("\0")
    except OSError:
        return False


def _kill(pids: list[int]) -> None:
    """Those that have not ended by themselves."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def records(out: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, also while it is written."""
    file = out / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(out: Path) -> list[dict[str, Any]]:
    return [record for record in records(out) if "loss" in record]


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """What training computed, without what the clock says."""
    kept = ("step", "loss", "grad_norm", "lr", "samples", "eval_loss", "eval_tokens")
    return [tuple((key, r[key]) for key in kept if key in r) for r in records(out)]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, every folder with None."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _session(pid: int) -> int | None:
    """None for a process that is gone or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _deaf(pid: int, number: int) -> bool:
    """A signal is ignored, or held back, by a process; or there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def stdout(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""
