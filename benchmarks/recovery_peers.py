"""How long another way needs after a loss: ``python -m benchmarks.recovery_peers``.

torchft (``pip install torchft``) trains two replicas of a small model, one process each, with gloo
on this machine. One is killed in the middle of training and started again at once. Printed are the
seconds from the kill to the next step of the other one alone, and to the first step that both did:
that is what ``python -m benchmarks.chaos --kinds kill --plans dp2`` measures of Weft.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

KILLED_AFTER = 30
LOOK_S = 0.005
HEARTBEAT_MS = (100, 500, 1000, 5000)
"""After which the lighthouse takes a replica for lost; the last is what it takes by itself."""


def replica(number: int, folder: Path, lighthouse: str) -> None:
    """Train, and note when each step was done, with how many."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    )
    made = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        made.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": made.state_dict()},
        replica_id=f"replica{number}",
        timeout=timedelta(seconds=20),
        lighthouse_addr=lighthouse,
        rank=0,
        world_size=1,
        hostname="localhost",
    )
    optim = Optimizer(manager, made)
    with (folder / str(number)).open("a", buffering=1) as file:
        while True:
            optim.zero_grad()
            model(torch.randn(64, 256)).square().mean().backward()
            # Not its DistributedDataParallel: version 0.2.0 ends there on an assert after a loss.
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            for work in [manager.allreduce(grad) for grad in grads]:
                work.wait()
            before = manager.current_step()
            optim.step()
            if manager.current_step() > before:
                file.write(
                    f"{time.monotonic()} {manager.current_step()} {manager.num_participants()}\n"
                )


def measured(folder: Path, heartbeat_ms: int) -> tuple[float, float]:
    """Seconds from the kill to the next step of the other, and to one of both."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    log = (folder / "log").open("a")

    def started(number: int) -> subprocess.Popen[bytes]:
        words = ["--replica", str(number), "--folder", str(folder)]
        command = [sys.executable, "-m", "benchmarks.recovery_peers", *words]
        command += ["--lighthouse", lighthouse.address()]
        return subprocess.Popen(command, stdout=log, stderr=log)

    processes = [started(number) for number in range(2)]
    try:
        _await(folder, lambda rows: sum(many == 2 for _, many in rows) >= KILLED_AFTER)
        at = time.monotonic()
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        processes[1] = started(1)
        alone = _await(folder, lambda rows: any(when > at for when, _ in rows)) - at
        _await(folder, lambda rows: any(w > at + 0.05 and many == 2 for w, many in rows))
        rows = _rows(folder)
        return alone, min(w for w, many in rows if w > at + 0.05 and many == 2) - at
    finally:
        for process in processes:
            process.kill()
            process.wait()
        lighthouse.shutdown()


def _rows(folder: Path) -> list[tuple[float, int]]:
    file = folder / "0"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [line.split() for line in lines if line.count(" ") == 2]
    return [(float(when), int(many)) for when, _, many in rows]


def _await(folder: Path, is_so: object) -> float:
    assert callable(is_so)
    deadline = time.monotonic() + 60
    while not is_so(_rows(folder)):
        assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(LOOK_S)
    return time.monotonic()


def main() -> None:
    """Print the medians for each patience of the lighthouse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replica is not None:
        replica(asked.replica, asked.folder, asked.lighthouse)
        return
    for heartbeat_ms in HEARTBEAT_MS:
        found = []
        for _ in range(asked.runs):
            with tempfile.TemporaryDirectory(prefix="weft-peers-") as folder:
                found.append(measured(Path(folder), heartbeat_ms))
        alone, both = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"lost after {heartbeat_ms} ms: alone {alone:.2f} s, both {both:.2f} s", flush=True)


if __name__ == "__main__":
    main()
