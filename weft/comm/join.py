"""Join the processes of one job into a ``Comm``, whoever started them: we, torchrun, srun."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from weft.comm.comm import Comm
from weft.comm.place import Place


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
