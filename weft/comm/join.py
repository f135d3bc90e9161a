"""Join the processes of one job into a ``Comm``, whoever started them: we, torchrun, srun."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from weft.comm.address import RankAddress
from weft.comm.arrival import await_ranks
from weft.comm.comm import Comm
from weft.comm.members import Member
from weft.config.errors import ConfigError

ARRIVAL_S = 120.0
"""How long ranks may come one after another."""


def join(
    address: RankAddress, *, backend: str, device: torch.device, timeout_s: float = 600.0
) -> Comm:
    """Meet the other ranks. One process needs nobody and opens no socket.

    All ranks are joined by gloo, and those whose devices share another ``backend`` by that too.
    Collectives give up after ``timeout_s`` seconds.

    Raises:
        ConfigError: a rank has not come, with its number.
    """
    if address.world_size == 1:
        return Comm(device=device, timeout_s=timeout_s)
    if address.store_file is not None:
        # On one machine nothing needs to leave it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    store = meeting_store(address, timeout_s)
    await_ranks(store, address.rank, address.world_size, min(timeout_s, ARRIVAL_S))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=address.rank,
        world_size=address.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    member = Member(
        family=device.type,
        backend=backend,
        node=f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}",
        chip="" if device.type == "cpu" else str(device),
    )
    everyone = Comm(address.rank, address.world_size).gather_json(asdict(member), name="meet")
    members = [Member(**each) for each in everyone]
    comm = Comm(address.rank, address.world_size, device, members=members, timeout_s=timeout_s)
    comm.open_groups([])
    return comm


def meeting_store(address: RankAddress, timeout_s: float) -> Store:
    """The meeting point, with a prefix of its own for every restart.

    Rank 0 may ask again as long as it holds what it got before.
    Without the prefix the ranks of a restarted job would read the addresses of dead processes.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if address.store_file is not None:
        return PrefixStore(attempt, FileStore(str(address.store_file), address.world_size))
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait_s = min(timeout_s, ARRIVAL_S)
    try:
        store = TCPStore(
            host,
            port,
            is_master=address.rank == 0 and not agent_hosts_it,
            multi_tenant=True,
            wait_for_workers=False,  # ``await_ranks`` does, and knows them by number
            timeout=timedelta(seconds=wait_s),
        )
    except RuntimeError as error:
        expected = f"the address and port where rank 0 can be reached within {wait_s:g} s"
        problem = f"{str(error).splitlines()[0].rstrip('.')}."
        raise ConfigError("MASTER_ADDR", f"{host}:{port}", expected, problem) from error
    return PrefixStore(f"weft/{attempt}", store)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else names[0]
