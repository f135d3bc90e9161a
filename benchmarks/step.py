"""Time of one training step: Weft against plain PyTorch, DDP, accelerate and transformers.

    python -m benchmarks.step [--rounds N] [--device cuda] [--json]

All contenders train a Llama of the same shape on the same batches, with fused AdamW and clipping,
one thread a process. They take turns step by step in the same processes, so that whatever else
the machine does hits all of them; the figure to read is the ratio (theirs / ours; above 1, Weft
is faster) and its spread over rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.devices import add_device, join_default_group, joined, why_too_few
from benchmarks.plain_llama import PlainLlama, token_loss
from weft.cluster.cluster import HOST
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.config.optim_sections import AdamWConfig
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.nn.stage import MicroBatch
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.platform.base import Platform
from weft.platform.registry import platform_named
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model

SEQ_LEN = 256
SAMPLES = 8
"""Samples a step of each process."""
OPTIM = AdamWConfig(lr=1e-3)
MODEL = "demo-5m"

Step = Callable[[Tensor], None]
"""Trains on ``[SAMPLES, SEQ_LEN + 1]`` tokens of this process."""


def spec() -> ModelSpec:
    """The model of the demo."""
    return replace(SIZES[MODEL], vocab_size=4096, seq_len=SEQ_LEN)


def plain_model(precision: Precision, device: torch.device) -> nn.Module:
    """The yardstick with Weft's initial scale."""
    torch.manual_seed(0)
    model = PlainLlama(spec())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same update that Weft does."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=OPTIM.lr,
        betas=OPTIM.betas,
        weight_decay=OPTIM.weight_decay,
        fused=True,
    )


def weft_step(comm: Comm, precision: Precision) -> Step:
    """Weft over equal single-stage pipelines."""
    shape = spec()
    pipelines = tuple(
        PipelinePlan(
            stages=(
                StagePlan(
                    mesh=Mesh.of((rank,), dp=1),
                    layers=(0, shape.num_layers),
                    device=comm.device.type,
                    precision=precision,
                ),
            ),
            samples=SAMPLES,
            microbatch=SAMPLES,
        )
        for rank in range(comm.world_size)
    )
    plan = Plan(num_layers=shape.num_layers, pipelines=pipelines)
    built = assemble_model(plan, shape, comm, optim=OPTIM, seq_len=SEQ_LEN)
    fill(built.gradients, initial(0))
    weights = torch.ones(SAMPLES, SEQ_LEN, device=comm.device)

    def step(tokens: Tensor) -> None:
        tensors = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        batch = MicroBatch(tensors)
        built.engine.step([batch])

    return step


def plain_step(precision: Precision, device: torch.device) -> Step:
    """A minimal loop; bf16 with fp32 master weights, as Weft does it."""
    model = plain_model(precision, device)
    if precision == "bf16":
        return _master_step(model)
    optimizer = adamw(model)

    def step(tokens: Tensor) -> None:
        token_loss(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _master_step(model: nn.Module) -> Step:
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=OPTIM.lr, betas=OPTIM.betas, fused=True)

    def step(tokens: Tensor) -> None:
        token_loss(model, tokens).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return step


def ddp_step(device: torch.device, *, bucket_view: bool) -> Step:
    """PyTorch DistributedDataParallel over the default group."""
    model = DistributedDataParallel(
        plain_model("fp32", device), gradient_as_bucket_view=bucket_view
    )
    optimizer = adamw(model)

    def step(tokens: Tensor) -> None:
        token_loss(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate_step(device: torch.device) -> Step:
    """Hugging Face accelerate around the same loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == HOST)
    assert accelerator.num_processes == 2, "accelerate did not see the other process"
    model = plain_model("fp32", device)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(tokens: Tensor) -> None:
        accelerator.backward(token_loss(model, tokens))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def take_turns(
    steps: dict[str, Step], rounds: int, comm: Comm, platform: Platform
) -> dict[str, list[float]]:
    """Seconds of every contender's step, round by round, after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    generator = torch.Generator().manual_seed(comm.rank)
    for number in range(rounds + 2):
        tokens = torch.randint(0, spec().vocab_size, (SAMPLES, SEQ_LEN + 1), generator=generator)
        tokens = tokens.to(comm.device)
        for name, step in steps.items():
            start = time.perf_counter()
            step(tokens)
            platform.synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def one_process(
    address: RankAddress, precision: Precision, rounds: int, device: str
) -> dict[str, list[float]]:
    """Weft and the plain loop, alone."""
    platform = platform_named(device)
    comm = Comm(device=platform.device(address.local_rank))
    platform.multiply_fp32(tf32=False)
    steps = {
        "weft": weft_step(comm, precision),
        "plain PyTorch": plain_step(precision, comm.device),
    }
    return take_turns(steps, rounds, comm, platform)


def two_processes(address: RankAddress, rounds: int, device: str) -> dict[str, list[float]]:
    """Weft and what people use for data parallelism."""
    os.environ |= {
        "RANK": str(address.rank),
        "WORLD_SIZE": str(address.world_size),
        "LOCAL_RANK": str(address.local_rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "ACCELERATE_USE_CPU": str(device == HOST).lower(),
    }
    comm, platform = joined(address, device)
    join_default_group(address, platform)
    steps = {
        "weft": weft_step(comm, "fp32"),
        "DDP": ddp_step(comm.device, bucket_view=False),
        "DDP, bucket views": ddp_step(comm.device, bucket_view=True),
    }
    if importlib.util.find_spec("accelerate"):
        steps["accelerate"] = accelerate_step(comm.device)
    seconds = take_turns(steps, rounds, comm, platform)
    if importlib.util.find_spec("accelerate"):
        from benchmarks.trainer import trainer_seconds

        seconds["transformers Trainer"] = trainer_seconds(
            plain_model("fp32", comm.device),
            rounds,
            samples=SAMPLES,
            length=SEQ_LEN + 1,
            vocab_size=spec().vocab_size,
        )
    dist.destroy_process_group()
    comm.close()
    return seconds


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    seconds: dict[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        """The schema that every benchmark prints."""
        median = {name: statistics.median(values) for name, values in self.seconds.items()}
        ours = median.pop("weft")
        ratios = {
            peer: [t / w for t, w in zip(self.seconds[peer], self.seconds["weft"], strict=True)]
            for peer in median
        }
        middle = {peer: statistics.median(values) for peer, values in ratios.items()}
        best = min(middle, key=lambda peer: middle[peer])
        quarter = statistics.quantiles(ratios[best], n=4)
        return {
            "name": self.name,
            "ours": ours,
            "theirs": median,
            "ratio": middle[best],
            "ratios": middle,
            "unit": "s",
            "spread": [quarter[0], quarter[2]],
        }


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    add_device(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        too_few = why_too_few(options.device, 2)
    except ConfigError as error:
        parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool() as pool:
        rows = [
            Row(
                f"one process, {p}",
                pool.run(one_process, p, options.rounds, options.device, world_size=1)[0],
            )
            for p in ("fp32", "bf16")
        ]
        if too_few:
            print(f"two processes: {too_few}", file=sys.stderr)
        else:
            args = (options.rounds, options.device)
            results = pool.run(two_processes, *args, world_size=2, timeout_s=900)
            rows.append(Row("two processes, fp32", results[0]))
    records = [row.to_json() for row in rows]
    if options.json:
        print(json.dumps(records, indent=2))
        return
    for record in records:
        print(f"{record['name']}: Weft {record['ours'] * 1000:.0f} ms a step")
        for peer, ratio in record["ratios"].items():
            print(f"    {peer}: {record['theirs'][peer] * 1000:.0f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
