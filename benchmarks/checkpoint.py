"""How long training waits for a checkpoint, beside ``torch.distributed.checkpoint``.

    python -m benchmarks.checkpoint [--gb 1.0] [--rounds 3] [--folder DIR] [--slow MB/S] [--json]

One rank with so many GB of fp32 state in 64 tensors saves and loads it in turn by every way, each
round into a new folder. ``stall``: until the tensors may change; ``done``: until the checkpoint can
be opened. PyTorch's files are synced too; it keeps no checksums, and Weft checks all on loading.
``cold``: of files that the system's cache does not hold; where it cannot be told to let go of them
(files in memory), the same as warm. ``--slow`` lets Weft's files take as long as storage of that
speed needs, for the rank and for the agent, and leaves PyTorch out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import slow_agent as slow
from weft.checkpoint import shard
from weft.checkpoint.agent import client
from weft.checkpoint.agent.client import AgentClient, start_agent
from weft.checkpoint.agent.memory import MemoryOfMachine
from weft.checkpoint.agent.wire import Commit, Hello, Save
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard, write_rank
from weft.checkpoint.store import begin, commit
from weft.plan.box import Box

TENSORS = 64
Times = dict[str, float]
"""Seconds by what was done."""


def state_of(gb: float) -> dict[str, Tensor]:
    """What a rank holds."""
    numel = int(gb * 1e9 / 4 / TENSORS)
    return {f"layer{n:02d}.weight": torch.randn(numel // 1024, 1024) for n in range(TENSORS)}


def shards_of(state: dict[str, Tensor]) -> list[Shard]:
    """The same as Weft saves it."""
    return [
        Shard(name, "param", tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor)
        for name, tensor in state.items()
    ]


def timed(work: Callable[[], object]) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def by_ranks(state: dict[str, Tensor], root: Path) -> Times:
    """Weft, written by the rank itself."""

    def save() -> None:
        folder = begin(root, 1)
        commit(root, 1, [write_rank(folder, 0, shards_of(state))], {})

    return {"save": timed(save)}


class ByAgent:
    """Weft, written by the agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process, path = start_agent(folder / "agent.log", folder)
        self.client = AgentClient(path, Hello(rank=0, ranks_here=1, commits=True))
        self.saves = 0

    def save(self, state: dict[str, Tensor], root: Path) -> Times:
        self.saves += 1
        save = Save(root=str(root), step=1, name=f"save{self.saves}", timeout_s=600.0)
        began = time.perf_counter()
        slot = self.client.copy(shards_of(state))
        self.client.hand_over(slot, save, world_size=1, state={})
        self.client.commit(Commit(save=save, keep=1))
        stall = time.perf_counter() - began
        self.client.wait()
        return {"stall": stall, "done": time.perf_counter() - began}

    def load(self, state: dict[str, Tensor], _: Path) -> Times:
        """From what it keeps in memory, into tensors that exist."""

        def read() -> None:
            with MemoryOfMachine(self.folder) as memory:
                checkpoint = memory.open(memory.offers[-1])
            for name, tensor in state.items():
                checkpoint.read_into(tensor, name, "param")
            checkpoint.close()

        return {"load": timed(read)}

    def close(self) -> None:
        self.client.forget()
        self.client.close()
        self.process.wait(60)


def load(state: dict[str, Tensor], root: Path) -> Times:
    """Weft: every element, compared with its checksum, into tensors that exist."""

    def read() -> None:
        checkpoint = open_checkpoint(root)
        for name, tensor in state.items():
            checkpoint.read_into(tensor, name, "param")

    return {"load": timed(read)}


def load_cold(state: dict[str, Tensor], root: Path) -> Times:
    """Weft, where the files have to come from the disk."""
    drop_cache(root)
    return load(state, root)


def load_cold_by_dcp(state: dict[str, Tensor], folder: Path) -> Times:
    """PyTorch, where the files have to come from the disk."""
    drop_cache(folder)
    return load_by_dcp(state, folder)


def drop_cache(folder: Path) -> None:
    """Ask the system to keep nothing of the files in memory; they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_dcp(state: dict[str, Tensor], folder: Path) -> Times:
    """PyTorch, at once."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    return {"save": timed(lambda: dcp.save(state, storage_writer=writer))}


def by_dcp_async(state: dict[str, Tensor], folder: Path) -> Times:
    """PyTorch, in a thread of the rank."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    began = time.perf_counter()
    future = dcp.async_save(state, storage_writer=writer)
    stall = time.perf_counter() - began
    future.result()  # type: ignore[union-attr]
    return {"stall": stall, "done": time.perf_counter() - began}


def load_by_dcp(state: dict[str, Tensor], folder: Path) -> Times:
    """PyTorch, into tensors that exist; it checks nothing."""
    return {"load": timed(lambda: dcp.load(state, checkpoint_id=folder))}


Way = Callable[[dict[str, Tensor], Path], Times]


def ways_of(agent: ByAgent, *, is_slow: bool) -> tuple[dict[str, Way], dict[str, Way]]:
    """Saves, and loads of what the save before them in the same list has left."""
    weft: dict[str, Way] = {
        "weft, by the rank": by_ranks,
        "weft, by the agent": agent.save,
    }
    loads: dict[str, Way] = {"weft": load, "weft, cold": load_cold, "weft, memory": agent.load}
    torch_saves: dict[str, Way] = {"torch, save": by_dcp, "torch, async_save": by_dcp_async}
    torch_loads: dict[str, Way] = {"torch": load_by_dcp, "torch, cold": load_cold_by_dcp}
    if is_slow:
        return weft, loads
    return {**weft, **loads, **torch_saves, **torch_loads}, {**loads, **torch_loads}


def measure(
    gb: float, rounds: int, parent: Path | None, *, is_slow: bool = False
) -> dict[str, list[float]]:
    """Seconds of each way, by round; the first save of each way is not counted."""
    state = state_of(gb)
    before = {name: tensor.clone() for name, tensor in state.items()}
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=parent, prefix="weft-bench-") as name:
        folder = Path(name)
        agent = ByAgent(folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ways, loads = ways_of(agent, is_slow=is_slow)
        for number in range(rounds + 1):
            last = folder
            for way, work in ways.items():
                root = last if way in loads else folder / way.replace(" ", "")
                for tensor in state.values() if way in loads else ():
                    tensor.zero_()
                for key, seconds in work(state, root).items():
                    found.setdefault(f"{way}: {key}", []).extend([seconds] * (number > 0))
                if way in loads:
                    assert all(torch.equal(state[key], before[key]) for key in state), way
                last = root
            for made in folder.glob("*,*"):
                shutil.rmtree(made)
        agent.close()
        dist.destroy_process_group()
    return found


@contextmanager
def slow_storage(mb_s: float | None) -> Iterator[None]:
    """Weft's files take as long as storage of so many MB/s needs, here and in agents."""
    if mb_s is None:
        yield
        return
    os.environ[slow.VARIABLE] = str(mb_s)
    before = client.AGENT, shard.write_pieces
    client.AGENT, shard.write_pieces = slow.__name__, slow.write_pieces
    try:
        yield
    finally:
        client.AGENT, shard.write_pieces = before
        del os.environ[slow.VARIABLE]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a disk or /dev/shm")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slow", type=float, help="MB/s of the storage that is imitated")
    options = parser.parse_args()
    is_slow = options.slow is not None
    with slow_storage(options.slow):
        found = measure(options.gb, options.rounds, options.folder, is_slow=is_slow)
    if options.json:
        print(json.dumps(found))
        return
    for what, seconds in found.items():
        each = ", ".join(f"{value:.3f}" for value in seconds)
        print(f"{what:28} {statistics.median(seconds):8.3f} s   ({each})")


if __name__ == "__main__":
    main()
