"""Ranks on this machine as it is: no network of their own and no limits, as `weft train` has them.

For trials of plans on the very processors or accelerators that are to run them.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from weft.lab.lab import LOGS
from weft.lab.ranks import RankProcess, start
from weft.lab.steps import hold, processor_s

_SHORT = (b"out of memory", b"OutOfMemory")
"""What a rank prints that ends for want of memory on its device, somewhere in its last lines."""
_LAST_BYTES = 20_000
_COUNTS = Path("/proc/vmstat")
"""Of the kernel, a name and a number a line."""


class Here:
    """As many ranks as are asked for, whose group leaders this process can stop and resume."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.ranks: list[RankProcess] = []
        self._logs: list[Path] = []
        self._killed = kills_for_memory(_COUNTS)

    @contextmanager
    def built(self) -> Iterator[None]:
        """While this lasts, ranks may be there; afterwards none is left."""
        with ExitStack() as stack:
            stack.callback(self._end)
            yield

    def _end(self) -> None:
        for rank in self.ranks:
            self._signal(rank, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()

    def start(self, command: Sequence[str], out: Path, *, quiet: bool) -> None:
        """Start the command once for every rank. Each prints into a file of its own; ``quiet``: a
        lab has no say in that either."""
        del quiet
        logs = out / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        for rank in range(self._world_size):
            file = logs / f"rank{rank}.log"
            with file.open("wb") as log:
                variables = self._environment(rank, port)
                process = start(command, variables, stdout=log, stderr=log)
            self._logs.append(file)
            self.ranks.append(RankProcess(rank, process))

    def _environment(self, rank: int, port: int) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def look(self, now_s: float) -> bool:
        """See which ranks have ended; have all?"""
        for rank in self.ranks:
            if rank.has_just_ended(now_s) and rank.code:
                rank.killed_for_memory = self._ran_out(rank)
        return all(rank.code is not None for rank in self.ranks)

    def _ran_out(self, rank: RankProcess) -> bool:
        """The machine killed it, or its device had no more memory; where the kernel does not say,
        who else would kill it?"""
        if rank.code == -signal.SIGKILL:
            killed = kills_for_memory(_COUNTS)
            return killed is None or killed != self._killed
        with self._logs[rank.rank].open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            said = log.read()
        return any(words in said for words in _SHORT)

    def used_s(self) -> tuple[float, ...]:
        """Processor time of every rank so far; 0 for one that has ended."""
        return tuple(processor_s([rank.process.pid]) for rank in self.ranks)

    def hold(self) -> None:
        """No rank does anything until all may go on."""
        hold(self.ranks, lambda rank: [rank.process.pid], self._signal)

    def go_on(self) -> None:
        """Ranks that were held."""
        for rank in self.ranks:
            self._signal(rank, signal.SIGCONT)

    @staticmethod
    def _signal(rank: RankProcess, number: signal.Signals) -> None:
        """To a rank and what it started: it leads a session of its own. It alone is stopped: it
        ends with us, and nobody would wake the others."""
        if rank.code is None:
            send = os.kill if number == signal.SIGSTOP else os.killpg
            with suppress(ProcessLookupError):
                send(rank.process.pid, number)


def kills_for_memory(counts: Path) -> int | None:
    """Processes that the kernel has ended for want of memory, in all control groups; None where it
    does not say."""
    lines = counts.read_text().splitlines() if counts.exists() else []
    numbers = dict(line.split(maxsplit=1) for line in lines)
    return int(numbers["oom_kill"]) if "oom_kill" in numbers else None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
