"""What starting a job costs each of its ranks: ``python -m benchmarks.startup --ranks 16 64 256``.

Ranks are light processes of this machine, eight to a pretended node, that meet at a TCP store of
rank 0, join, and compare a plan for all of them; none trains. Bytes and packets are what the
kernel counted on a rank's TCP connections, the store's included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from weft.cluster.cluster import Cluster, Node
from weft.comm.address import RankAddress
from weft.comm.join import join_at
from weft.comm.rendezvous import Rendezvous
from weft.config.load import load_config
from weft.resolve.resolve import resolve
from weft.train.agreeing import refuse_unlike_ranks
from weft.train.job import Job

NODE = Node(host="here", cpu="", cores=2, memory_gib=16, cpu_bf16=False, chips=(), problems=())
RANKS_OF_A_NODE = 8
BYTES_RECEIVED, DATA_SEGMENTS_IN, TCP_INFO_BYTES = 128, 152, 192
"""Where Linux has them in ``struct tcp_info``."""
TIMEOUT_S = 600.0


def job_of(world_size: int, out: Path) -> Job:
    """A data-parallel job of so many ranks."""
    shares = ",".join(["1"] * world_size)
    words = [f"plan.shares=[{shares}]", "batch.micro=1", f"batch.samples={world_size}"]
    resolved = resolve(load_config("debug", words), Cluster(nodes=(NODE,)))
    return Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out,
        last_step=1,
        threads=1,
        console="quiet",
        json=False,
        files={},
    )


def connections() -> Iterator[tuple[int, int]]:
    """Bytes and packets received over each TCP connection of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            (received,) = struct.unpack_from("Q", info, BYTES_RECEIVED)
            (packets,) = struct.unpack_from("I", info, DATA_SEGMENTS_IN)
            one.getpeername()
            yield received, packets


def num_files() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def rank_main(rank: int, job: Job, port: int, file: Path) -> None:
    """One rank: the phases, and what each took of the processor."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    node, world_size, master = (
        str(rank // RANKS_OF_A_NODE),
        job.plan.world_size,
        ("127.0.0.1", port),
    )
    address = RankAddress(rank=rank, world_size=world_size, master=master, node=node)
    inherited, before = num_files(), time.process_time()
    with Rendezvous(address, TIMEOUT_S) as rendezvous:
        comm = join_at(rendezvous, backend="gloo", device=torch.device("cpu"))
        joined = time.process_time()
        refuse_unlike_ranks(comm, job)
        agreed = time.process_time()
        files, received = num_files() - inherited, list(connections())
        row = {
            "join": 1e3 * (joined - before),
            "agree": 1e3 * (agreed - joined),
            "bytes": sum(number for number, _ in received),
            "packets": sum(number for _, number in received),
            "connections": len(received),
            "descriptors": files,
        }
        comm.barrier(name="measured")
        comm.close()
        file.write_text(json.dumps(row))


def measured(world_size: int) -> list[dict[str, float]]:
    """What each rank found, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        job = job_of(world_size, Path(folder))
        files = [Path(folder, f"{rank}.json") for rank in range(world_size)]
        ranks = [
            fork.Process(target=rank_main, args=(rank, job, port, file))
            for rank, file in enumerate(files)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return [json.loads(file.read_text()) for file in files]


def rows(world_size: int, found: Sequence[dict[str, float]]) -> Iterator[str]:
    """A line of a Markdown table: the middle of the ranks, the most of any but rank 0, rank 0."""
    cells = [f"{world_size:,}"]
    for what in ("join", "agree", "bytes", "packets", "connections", "descriptors"):
        first, *others = (row[what] for row in found)
        scale = 1e3 if what == "bytes" else 1
        numbers = (statistics.median(others), max(others), first)
        cells.append(" / ".join(f"{number / scale:,.0f}" for number in numbers))
    yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    torch.set_num_threads(1)
    print("| ranks | join, CPU ms | agree, CPU ms | kB received | packets | connections | files |")
    print("|---|---|---|---|---|---|---|")
    for world_size in parser.parse_args().ranks:
        for row in rows(world_size, measured(world_size)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
