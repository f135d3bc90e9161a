"""Which process of a job this is. No torch, so that commands can ask at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from weft.comm.launchers import as_torchrun

ARRIVAL_S = 120.0
"""How long ranks may come one after another."""
_ANY_PORT = 9
"""Nothing is sent there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAddress:
    """Which process of which job this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store_file: Path | None = None
    """Where the ranks of one machine meet; None: at rank 0's address."""
    master: tuple[str, int] = ("", 0)
    """Rank 0's address and port."""
    ranks_here: int | None = None
    """How many processes of the job this machine runs, where its launcher says so."""
    node: str = ""
    """The number of this machine, where its launcher says it."""
    phase_file: Path | None = None
    """Where this rank notes which phase of its life it is in; None: nobody asks."""
    card: int | None = None
    """Which of its machine's devices of its family it has; None: they are given out in the order of
    ranks."""
    meeting: str = ""
    """Of this epoch, where ranks of others met at ``master`` before, which is nobody's of them."""

    @staticmethod
    def from_environment(
        environment: Mapping[str, str] = os.environ, *, may_be_spare: bool = False
    ) -> RankAddress | None:
        """The address that torchrun, srun or a job system gave this process; None: it gave none.

        Raises:
            ConfigError: names the variable that is missing, or cannot be.
        """
        given = as_torchrun(environment, may_be_spare=may_be_spare)
        if not given:
            return None
        return RankAddress(
            rank=int(given["RANK"]),
            world_size=int(given["WORLD_SIZE"]),
            local_rank=int(given["LOCAL_RANK"]),
            ranks_here=int(given["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in given else None,
            node=given.get("GROUP_RANK", ""),
            master=(given["MASTER_ADDR"], int(given["MASTER_PORT"])),
        )

    @property
    def host(self) -> str:
        """This rank's machine: what plays one has a number beside the name."""
        return f"{socket.gethostname()}/{self.node}"


def own_host(environment: Mapping[str, str] = os.environ) -> str:
    """The address of this machine at which others of the job reach it."""
    given = as_torchrun(environment, may_be_spare=True)
    if not given:
        return "127.0.0.1"
    return _toward(given["MASTER_ADDR"], int(given["MASTER_PORT"]))


def host_for_others(hosts: Iterable[str], environment: Mapping[str, str] = os.environ) -> str:
    """``own_host`` for machines whose own are these. Where rank 0's machine knows its own name as a
    loopback address, as Debian's do, that is the one at which it reaches another."""
    mine = own_host(environment)
    outside = [host for host in hosts if not ip_address(host).is_loopback]
    if outside and ip_address(mine).is_loopback:
        return _toward(outside[0], _ANY_PORT)
    return mine


def _toward(host: str, port: int) -> str:
    """What this machine's address is for another one: for the first of its addresses that can be
    reached from here."""
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as end:
                end.connect(place)  # sends nothing
                return str(end.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem
