"""What an update costs whose state lies on disk, beside one with all in memory.

    python -m benchmarks.state_elsewhere FOLDER [--json]

One rank in bf16 with fp32 masters, AdamW, 61 million parameters: 0.73 GB of state. In turns: the
update with state in memory, with state in files of FOLDER, and as many bytes read and written there
by plain calls. Medians of five; ``spread`` is the largest over the smallest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from weft.comm.address import RankAddress
from weft.config.optim_sections import AdamWConfig
from weft.memory.tiers import PIECE_BYTES
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.precision.roles import Tier
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

REPEATS = 5
SPEC = replace(SIZES["debug-1m"], d_model=768, d_ff=2048, d_head=64, num_heads=12, num_kv_heads=12)
SPEC = replace(SPEC, num_layers=5, vocab_size=16_384)


def built(tier: Tier, folder: str) -> Built:
    """A rank that has done one update."""
    stage = StagePlan(
        mesh=Mesh.of((0,)), layers=(0, SPEC.num_layers), precision="bf16", state_tier=tier
    )
    pipeline = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    plan = Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))
    with tempfile.TemporaryDirectory() as meeting:
        address = RankAddress(rank=0, world_size=1, local_rank=0, store_file=Path(meeting) / "meet")
        comm, _ = join_plan(address, plan, timeout_s=600)
    optim = AdamWConfig(state_folder=folder)
    made = assemble_model(plan, SPEC, comm, optim=optim, seq_len=128)
    fill(made.gradients, initial(1))
    update(made)
    return made


def update(made: Built) -> None:
    """With gradients of zero, which take as long as others."""
    made.gradients.begin(0)
    made.gradients.finish()
    made.optimizer.update(torch.ones(()))


def moved(folder: str, num_bytes: int) -> Callable[[], None]:
    """Reads and writes so many bytes of a file, a piece after another."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as what is returned
    os.posix_fallocate(file.fileno(), 0, num_bytes)
    piece = memoryview(bytearray(PIECE_BYTES))

    def move() -> None:
        for place in range(0, num_bytes, PIECE_BYTES):
            os.preadv(file.fileno(), [piece], place)
            os.pwritev(file.fileno(), [piece], place)

    return move


def main(arguments: Sequence[str]) -> None:
    """Measure, and print."""
    folder = next(each for each in arguments if not each.startswith("--"))
    here, there = built("device", folder), built("disk", folder)
    owned = [t for m in there.gradients.mains for _, t in there.optimizer.owned(m).values()]
    num_bytes = sum(t.nbytes for t in [*owned, *(m.value for m in there.gradients.mains)])
    ways = {
        "memory": lambda: update(here),
        "disk": lambda: update(there),
        "plain calls": moved(folder, num_bytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            begin = perf_counter()
            way()
            seconds[name].append(perf_counter() - begin)
    took = {name: median(each) for name, each in seconds.items()}
    row = {
        "name": f"update of {num_bytes / 1e9:.2g} GB on disk",
        "ours": took["disk"],
        "theirs": {name: took[name] for name in ("memory", "plain calls")},
        "ratio": {name: took["disk"] / took[name] for name in ("memory", "plain calls")},
        "unit": "s",
        "spread": max(seconds["disk"]) / min(seconds["disk"]),
    }
    sys.stdout.write(json.dumps([row], indent=None if "--json" in arguments else 2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
