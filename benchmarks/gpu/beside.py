"""An 8B model over all cards, beside FSDP2 and torchtitan, one after the other in turns."""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.devices import join_default_group
from benchmarks.gpu.part import Found, Here, Part
from benchmarks.gpu.speed import CLI_S, OPTIM, ROUNDS, WARM_UP, divided, model_over_all
from benchmarks.plain_llama import PlainLlama, token_loss
from weft.comm.address import RankAddress
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.platform.registry import platform_named

TORCHTITAN = "WEFT_TORCHTITAN"
"""Of the environment: a command that trains the same model on all cards and logs every step."""
RATE = re.compile(r"tps:\s*(?:\x1b\[\d+m)?([\d,.]*\d)")
"""As it writes tokens a second of a rank, with colours or without."""
TURNS, EACH = 2, 2
"""How often each is measured, and samples of a rank and step."""


def fsdp(
    address: RankAddress, device: str, spec: ModelSpec, seq_len: int, compiled: bool
) -> list[float]:
    """Seconds of steps of FSDP2, a group for each compiled block, set up as its documentation
    advises: bf16 on cards, fp32 sums, fused AdamW, values made after the model was divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    platform = platform_named(device)
    own = platform.device(address.local_rank)
    platform.multiply_fp32(tf32=False)
    join_default_group(address, platform)
    mesh = init_device_mesh(device, (address.world_size,))
    policy = MixedPrecisionPolicy()
    if not platform.is_host:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = PlainLlama(spec)
    for block in model.layers:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=own)
    angles = PlainLlama(replace(spec, num_layers=0, vocab_size=1))
    model.cos, model.sin = angles.cos.to(own), angles.sin.to(own)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, fused=True)
    seconds = []
    for turn in range(ROUNDS):
        torch.manual_seed(address.rank + turn * address.world_size)
        tokens = torch.randint(0, spec.vocab_size, (EACH, seq_len + 1)).to(own)
        torch.distributed.barrier()
        platform.synchronize()
        begun = time.perf_counter()
        token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        platform.synchronize()
        seconds.append(time.perf_counter() - begun)
    torch.distributed.destroy_process_group()
    return seconds[WARM_UP:]


def torchtitan(found: Found) -> Callable[[], float] | None:
    """Tokens a second of a rank by its command; None with a reason where there is none."""
    command = os.environ.get(TORCHTITAN, "")
    if not command:
        found.measures("torchtitan", f"left out: {TORCHTITAN} names no command that trains")
        return None

    def run() -> float:
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=CLI_S, check=False
        )
        said = done.stdout + done.stderr
        rates = [float(each.replace(",", "")) for each in RATE.findall(said)]
        if done.returncode or len(rates) <= WARM_UP:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise ValueError(f"torchtitan: ended with {done.returncode} and said {said[:200]}")
        return statistics.median(rates[WARM_UP:])

    return run


def beside(here: Here, found: Found) -> None:
    """Tokens a second of a card: ours with ZeRO 3, FSDP2, and torchtitan where it is named."""
    spec, seq_len, ranks, settings = model_over_all(here, found)
    many = len(ranks)
    stage = StagePlan(mesh=Mesh.of(ranks, dp=many), layers=(0, spec.num_layers), zero=3, **settings)
    pipeline = PipelinePlan(stages=(stage,), samples=EACH * many, microbatch=EACH * many)
    plan = Plan(num_layers=spec.num_layers, pipelines=(pipeline,))
    compiled = not here.is_host

    def ours() -> float:
        with here.pool() as pool:
            return _rate(pool.run(divided, plan, spec, seq_len, world_size=many), seq_len)

    def theirs() -> float:
        with here.pool() as pool:
            times = pool.run(fsdp, here.device, spec, seq_len, compiled, world_size=many)
            return _rate(times, seq_len)

    ways = {"Weft, ZeRO 3": ours, "FSDP2": theirs}
    titan = torchtitan(found)
    if titan is not None:
        ways["torchtitan"] = titan
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            rates[name].append(run())
            found.measures(f"{name}, tokens/s of a rank", statistics.median(rates[name]))
    for name in list(ways)[1:]:
        ratio = statistics.median(
            o / t for o, t in zip(rates["Weft, ZeRO 3"], rates[name], strict=True)
        )
        found.measures(f"Weft / {name}", ratio)
    found.proves(f"{len(ways)} train the same model, in turns")


def _rate(times: list[list[float]], seq_len: int) -> float:
    slowest = [max(each) for each in zip(*times, strict=True)]
    return EACH * seq_len / float(statistics.median(slowest))


PARTS = (
    Part(name="peers-8b", asks="an 8B model in ZeRO 3 beside FSDP2 and torchtitan", run=beside,
         minutes=8, devices=2),
)  # fmt: skip
