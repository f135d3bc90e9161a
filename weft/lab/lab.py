"""A small mixed cluster on this machine, for as long as one job needs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import floor
from pathlib import Path

from weft.cluster.cluster import Node
from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError
from weft.lab.cgroups import control_groups
from weft.lab.disk import SmallDisk
from weft.lab.identity import Identity
from weft.lab.network import Network
from weft.lab.ranks import RankProcess, environment, start
from weft.lab.steps import hold, processor_s
from weft.resolve.rank_chips import CLUSTER_VARIABLE

LOGS = "lab"
"""In the run folder: what ranks above 0 print, and what they run on."""
CLUSTER = "cluster.json"
"""There: the cluster file that ranks are told of."""
_ROUNDING = 1e-9


def refuse_too_much(cluster: ClusterFile, machine: Node) -> None:
    """Refuse a cluster whose chips would not all get what the file promises.

    Raises:
        ConfigError: its speeds add up to more cores than there are, or its memory to more.
    """
    chips = [chip for host in cluster.hosts for chip in host.chips]
    speeds = [chip.speed for chip in chips]
    if sum(speeds) > machine.cores + _ROUNDING:
        factor = floor(1000 * machine.cores / sum(speeds)) / 1000
        raise ConfigError(
            "speed",
            speeds,
            f"speeds that add up to at most {machine.cores}, the cores of this machine",
            f"They add up to {sum(speeds):g}; with {factor:g} of each they would fit.",
        )
    memory = [chip.memory_gib for chip in chips if chip.memory_gib is not None]
    if sum(memory) > machine.memory_gib:
        expected = f"at most {machine.memory_gib:g} in all, the memory of this machine"
        raise ConfigError("memory_gib", memory, expected, f"It adds up to {sum(memory):g}.")


class Lab:
    """Hosts, links and limits."""

    def __init__(self, cluster: ClusterFile, *, disk: Path | None = None, number: int = 0) -> None:
        """``disk``: a folder that has to have a file system of its own, to be made full;
        ``number``: of the lab, where this process has several."""
        self.cluster = cluster
        identity = Identity.own(number)
        self.name = identity.name
        self.network = Network(identity, cluster)
        self.groups = control_groups(identity)
        self.disk = SmallDisk(identity, disk) if disk else None
        self.ranks: list[RankProcess] = []

    @contextmanager
    def built(self) -> Iterator[None]:
        """While this lasts, all of it is there; afterwards nothing is left of it."""
        with ExitStack() as stack:
            stack.callback(self.network.remove)
            if self.disk is not None:
                stack.callback(self.disk.unmount)
            stack.callback(self._reap)
            stack.callback(self.groups.remove)
            self.network.build()
            if self.disk is not None:
                self.disk.mount()
            self.groups.build(self.cluster.world_size)
            for rank, (_, chip) in enumerate(self.cluster.by_rank):
                self.groups.add(rank)
                self.groups.set_speed(rank, chip.speed)
                if chip.memory_gib is not None:
                    self.groups.set_memory(rank, int(chip.memory_gib * 2**30))
            yield

    def _reap(self) -> None:
        for rank in self.ranks:
            rank.process.wait()

    def start(self, command: Sequence[str], out: Path, *, quiet: bool) -> None:
        """Start the command once for every chip. Rank 0 prints where this process does."""
        logs = out / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        described = logs / CLUSTER
        described.write_text(self.cluster.model_dump_json(indent=2, exclude_unset=True))
        for rank, (host, _) in enumerate(self.cluster.by_rank):
            variables = environment(self.cluster, rank)
            variables[CLUSTER_VARIABLE] = str(described.resolve())
            begin = partial(
                start,
                command,
                variables,
                namespace=self.network.hosts[host],
                groups=self.groups.entries(rank),
            )
            if rank == 0:
                process = begin(stdout=2 if quiet else None)
            else:
                with (logs / f"rank{rank}.log").open("wb") as log:
                    process = begin(stdout=log, stderr=log)
            self.ranks.append(RankProcess(rank, process))

    def look(self, now_s: float) -> bool:
        """See which ranks have ended; have all?"""
        for rank in self.ranks:
            if rank.has_just_ended(now_s) and rank.code == -signal.SIGKILL:
                rank.killed_for_memory = self.groups.killed_for_memory(rank.rank) > 0
        return all(rank.code is not None for rank in self.ranks)

    def used_s(self) -> tuple[float, ...]:
        """Processor time of every rank so far; 0 for one that has ended."""
        return tuple(processor_s(self.groups.processes(rank.rank)) for rank in self.ranks)

    def ask_to_stop(self) -> None:
        """SIGTERM to every rank that runs."""
        for rank in self.ranks:
            if rank.code is None:
                rank.process.terminate()

    def kill_rank(self, rank: int, why: str, *, by_fault: bool) -> None:
        """End a rank, and whatever it started, at once."""
        process = self.ranks[rank]
        if process.code is None:
            process.why, process.by_fault = why, by_fault
            self.groups.signal(rank, signal.SIGKILL)

    def kill_host(self, host: int, why: str) -> None:
        """A host without power: nobody hears of it any more, not even that it is gone."""
        self.network.unplug(host)
        for rank in self.cluster.ranks_of(host):
            self.kill_rank(rank, why, by_fault=True)

    def stop_rank(self, rank: int, for_good: str) -> None:
        """A rank does nothing any more, and nobody closes its connections.

        ``for_good``: why nobody resumes it, and nobody has to wait for it; or empty.
        """
        if for_good:
            self.ranks[rank].why, self.ranks[rank].by_fault = for_good, True
        self.groups.signal(rank, signal.SIGSTOP)

    def hold(self) -> None:
        """No rank does anything until all may go on."""
        ranks = [rank.rank for rank in self.ranks]
        hold(ranks, self.groups.processes, self.groups.signal)

    def go_on(self) -> None:
        """Ranks that were held."""
        for rank in self.ranks:
            self.groups.signal(rank.rank, signal.SIGCONT)
