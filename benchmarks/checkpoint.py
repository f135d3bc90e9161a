"""How long training waits for a checkpoint, beside ``torch.distributed.checkpoint``.

    python -m benchmarks.checkpoint [--gb 1.0] [--rounds 3] [--folder DIR] [--json]

One rank with so many GB of fp32 state in 64 tensors saves and loads it in turn by every way, each
round into a new folder. ``stall``: until the tensors may change; ``done``: until the checkpoint can
be opened. PyTorch's files are synced too; it keeps no checksums, and Weft checks all on loading.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from weft.checkpoint.agent.client import AgentClient, start_agent
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
        self.process, path = start_agent(folder / "agent.log", None)
        self.client = AgentClient(path, Hello(rank=0, ranks_here=1, commits=True))
        self.saves = 0

    def save(self, state: dict[str, Tensor], root: Path) -> Times:
        self.saves += 1
        save = Save(root=str(root), step=1, name=f"save{self.saves}", timeout_s=600.0)
        began = time.perf_counter()
        self.client.write(self.client.copy(shards_of(state)), save)
        order = Commit(save=save, world_size=1, state={}, keep=1)
        self.client.commit(order)
        stall = time.perf_counter() - began
        self.client.wait()
        return {"stall": stall, "done": time.perf_counter() - began}

    def close(self) -> None:
        self.client.close()
        self.process.wait(60)


def load(state: dict[str, Tensor], root: Path) -> Times:
    """Weft: every element, compared with its checksum, into tensors that exist."""

    def read() -> None:
        checkpoint = open_checkpoint(root)
        for name, tensor in state.items():
            checkpoint.read_into(tensor, name, "param")

    return {"load": timed(read)}


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


def measure(gb: float, rounds: int, parent: Path | None) -> dict[str, list[float]]:
    """Seconds of each way, by round; the first save of each way is not counted."""
    state = state_of(gb)
    before = {name: tensor.clone() for name, tensor in state.items()}
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=parent, prefix="weft-bench-") as name:
        folder = Path(name)
        agent = ByAgent(folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ways: dict[str, Callable[[dict[str, Tensor], Path], Times]] = {
            "weft, by the rank": by_ranks,
            "weft, by the agent": agent.save,
            "weft": load,
            "torch, save": by_dcp,
            "torch, async_save": by_dcp_async,
            "torch": load_by_dcp,
        }
        for number in range(rounds + 1):
            last = folder
            for way, work in ways.items():
                is_load = work in (load, load_by_dcp)
                root = last if is_load else folder / way.replace(" ", "")
                for key, seconds in work(state, root).items():
                    found.setdefault(f"{way}: {key}", []).extend([seconds] * (number > 0))
                if is_load:
                    assert all(torch.equal(state[key], before[key]) for key in state), way
                    for made in folder.glob("*,*"):
                        shutil.rmtree(made)
                last = root
        agent.close()
        dist.destroy_process_group()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a disk or /dev/shm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.gb, options.rounds, options.folder)
    if options.json:
        print(json.dumps(found))
        return
    for what, seconds in found.items():
        each = ", ".join(f"{value:.3f}" for value in seconds)
        print(f"{what:28} {statistics.median(seconds):8.3f} s   ({each})")


if __name__ == "__main__":
    main()
