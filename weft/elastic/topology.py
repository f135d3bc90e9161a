"""Links between the ranks of a job, or between processes of this machine: measured, or kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.cluster.topology import Links, file_of, in_order, save_links, saved_links
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.comm.links import machines, measure_links
from weft.elastic.pool import WorkerPool
from weft.platform.registry import platform_named


def links_of_job(
    address: RankAddress,
    device: str,
    folder: Path,
    *,
    fresh: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Links:
    """Collective, of all ranks of a launcher: what the first has kept of these machines, or what is
    measured, which the first keeps. ``fresh``: whatever was kept."""
    platform = platform_named(device)
    with join(address, device=platform.device(address.local_rank), **platform.joining()) as comm:
        hosts = machines(comm)
        known = None if fresh or address.rank else saved_links(folder, hosts)
        kept = None if known is None else in_order(known, hosts)
        if any(comm.gather_json(kept is not None, name="links")):
            return kept or Links(hosts=hosts, latency_s=(), bytes_s=())
        links = measure_links(comm, say)
        if address.rank == 0:
            save_links(links, file_of(folder, hosts))
        return links


def links_here(ranks: int, device: str, folder: Path, *, fresh: bool) -> Links:
    """Of so many processes on this machine, in a job of their own."""
    with WorkerPool() as pool:
        found: Links = pool.run(_of_pool, device, folder, fresh, world_size=ranks)[0]
    return found


def _of_pool(address: RankAddress, device: str, folder: Path, fresh: bool) -> Links:
    return links_of_job(address, device, folder, fresh=fresh)
