"""Join the processes of one job into a ``Comm``, whoever started them: we, torchrun, srun."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict

import torch

from weft.comm.address import ARRIVAL_S, RankAddress
from weft.comm.comm import Comm
from weft.comm.groups import Groups
from weft.comm.members import Member
from weft.comm.rendezvous import Rendezvous, await_ranks
from weft.platform.base import PointToPoint


def join(
    address: RankAddress,
    *,
    backend: str,
    device: torch.device,
    build: str = "",
    point_to_point: PointToPoint = "ordered",
    timeout_s: float = 600.0,
) -> Comm:
    """Meet the other ranks. One process needs nobody and opens no socket.

    All ranks are joined by gloo, and those whose devices share another ``backend`` of the same
    ``build`` by that too; it sends from rank to rank as ``point_to_point`` says. Collectives give
    up after ``timeout_s`` seconds.

    Raises:
        ConfigError: a rank has not come, with its number.
    """
    if address.world_size == 1:
        return Comm(device=device, timeout_s=timeout_s)
    rendezvous = Rendezvous(address, timeout_s)
    with ExitStack() as undo:
        undo.callback(rendezvous.close, wait=False)
        comm = join_at(
            rendezvous,
            backend=backend,
            device=device,
            build=build,
            point_to_point=point_to_point,
        )
        undo.pop_all()
    comm.rendezvous = rendezvous
    return comm


def join_at(
    rendezvous: Rendezvous,
    *,
    backend: str,
    device: torch.device,
    build: str = "",
    point_to_point: PointToPoint = "ordered",
) -> Comm:
    """Begin an epoch with all ranks that come to the same rendezvous, which stays open.

    Raises:
        ConfigError: a rank has not come, with its number.
        CommError: the rendezvous was aborted.
    """
    address, timeout_s = rendezvous.address, rendezvous.timeout_s
    rank, world_size = address.rank, address.world_size
    if world_size == 1:
        alone = Member(node=address.host)  # others may have been there, and come again
        return Comm(device=device, members=[alone], timeout_s=timeout_s)
    member = Member(
        family=device.type,
        backend=backend,
        build=build,
        point_to_point="tagged" if backend == "gloo" else point_to_point,
        node=address.host,
        chip="" if device.type == "cpu" else str(device),
    )
    store = rendezvous.store("epoch")
    arrival_s, abort = min(timeout_s, ARRIVAL_S), rendezvous.abort
    says = json.dumps(asdict(member))
    said = await_ranks(store, rank, world_size, arrival_s, says, abort=abort)
    known = {text: Member(**json.loads(text)) for text in dict.fromkeys(said)}
    members = [known[text] for text in said]
    is_local = address.store_file is not None
    groups = Groups(store, rank, device, timeout_s=timeout_s, is_local=is_local, abort=abort)
    if abort is not None:
        abort.then(groups.abort)
    with ExitStack() as undo:
        undo.callback(groups.abort)
        comm = Comm(rank, world_size, device, members=members, groups=groups, timeout_s=timeout_s)
        comm.open_groups([])
        undo.pop_all()
    return comm
