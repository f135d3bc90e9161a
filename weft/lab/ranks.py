"""The processes of a job in a lab: one a chip, each in its host's network and its own limits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError, RunError
from weft.lab.network import PORT, host_address
from weft.platform.vendor import hidden_from_all

MASTER_PORT = 29500
"""Nobody else has a port in a namespace that was made a moment ago."""
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def environment(cluster: ClusterFile, rank: int) -> dict[str, str]:
    """What a launcher such as torchrun tells a rank, and which port of its host leads out.

    Hosts have addresses and no names, which PyTorch would warn of. Chips are parts of cores: a rank
    sees no accelerator.
    """
    host, _ = cluster.by_rank[rank]
    here = cluster.ranks_of(host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_RANK": str(rank - here.start),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(cluster.hosts)),
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": PORT,
        "TP_SOCKET_IFNAME": PORT,
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **hidden_from_all(),
    }


@dataclass
class RankProcess:
    """One rank, while it runs and afterwards."""

    rank: int
    process: subprocess.Popen[bytes]
    ended_s: float | None = None
    """Time from the start of the ranks to its end, once that has been seen."""
    why: str = ""
    """Where somebody else ended it: the fault, or what the lab had for a reason."""
    by_fault: bool = False
    killed_for_memory: bool = False

    def has_just_ended(self, now_s: float) -> bool:
        """It has ended, and nobody has seen that before."""
        if self.ended_s is not None or self.process.poll() is None:
            return False
        self.ended_s = now_s
        return True

    @property
    def code(self) -> int | None:
        """Exit code; the number of a signal, less than 0; None while it runs."""
        return self.process.returncode

    def in_words(self) -> str:
        """How it ended."""
        code = self.code
        if code is None:
            return "still runs"
        ended = f"ended with exit code {code}"
        how = ended if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        if self.killed_for_memory:
            how += ", as its chip was out of memory"
        return f"{how}: {self.why}" if self.why else how


def start(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    namespace: str = "",
    groups: Sequence[Path] = (),
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start one rank. It ends with this process, however that one ends.

    Args:
        variables: What ``environment`` says, beside the variables of this process.
        namespace: Of its network; empty: this process's.
        groups: Files to write 0 into, which puts it under its limits.
        stdout: Where it prints; None: where this process does. So with ``stderr``.

    Raises:
        ConfigError: there is no such program.
        RunError: it cannot be put in its place.
    """
    with ExitStack() as stack:
        network = -1
        if namespace:
            network = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            stack.callback(os.close, network)
        handles = [os.open(file, os.O_WRONLY) for file in groups]
        for handle in handles:
            stack.callback(os.close, handle)
        try:
            return subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_entrance(network, handles),  # noqa: PLW1509 - there is one thread
            )
        except OSError as error:
            expected = "a program that can be started"
            raise ConfigError("COMMAND", command[0], expected, f"{error.strerror}.") from error
        except subprocess.SubprocessError as error:
            rank = variables["RANK"]
            raise RunError(f"rank {rank} cannot be put in its network and limits") from error


def _entrance(network: int, groups: Sequence[int]) -> Callable[[], None]:
    """What a process does before it becomes the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def enter() -> None:
        for handle in groups:
            os.write(handle, b"0")
        if network >= 0 and libc.setns(network, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return enter
