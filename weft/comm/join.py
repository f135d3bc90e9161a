"""Join the processes of one job into a ``Comm``, whoever started them: we, torchrun, srun."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from weft.comm.comm import Comm
from weft.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which process of which job this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store_file: Path | None = None
    """Where the ranks of one machine meet; None: ``MASTER_ADDR`` and ``MASTER_PORT``."""

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
        """The place that torchrun, srun or a job system gave this process; None: it gave none."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        for key in ("MASTER_ADDR", "MASTER_PORT"):
            if key not in environment:
                raise ConfigError(key, None, "the address and port of rank 0 beside RANK")
        return Place(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
        )


def join(place: Place, *, backend: str, device: torch.device, timeout_s: float = 600.0) -> Comm:
    """Meet the other ranks. One process needs nobody and opens no socket.

    Collectives give up after ``timeout_s`` seconds.
    """
    if place.world_size > 1:
        if place.store_file is not None:
            # On one machine nothing needs to leave it.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
        dist.init_process_group(
            backend,
            store=_store(place, timeout_s),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return Comm(place.rank, place.world_size, device)


def _store(place: Place, timeout_s: float) -> Store:
    """The meeting point, with a prefix of its own for every restart.

    Without the prefix the ranks of a restarted job would read the addresses of dead processes.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if place.store_file is not None:
        return PrefixStore(attempt, FileStore(str(place.store_file), place.world_size))
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=place.world_size,
        is_master=place.rank == 0 and not agent_hosts_it,
        timeout=timedelta(seconds=min(timeout_s, 120.0)),
    )
    return PrefixStore(f"weft/{attempt}", store)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else names[0]
