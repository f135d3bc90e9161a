"""Ways to spread a model over two processes: Weft against PyTorch's own, one thread each.

    python -m benchmarks.parallel [--only dp,zero,tp,pp,pieces] [--rounds N] [--steps N]
                                  [--device cuda] [--json]

Both sides train the same 10.5 M-parameter Llama from the same values on the same 2,048 tokens a
step; their losses are compared first. They take turns of a few steps in the same processes, never
both at once, and who begins changes from round to round. Read the ratio (theirs / ours; above 1,
Weft is faster) and its spread over rounds; that of CPU time is the steadier one where other work
shares the machine, but it does not see waiting, which is what a pipeline's schedule is about.
``--only pieces`` compares Weft with itself: tensor parallelism all at once, and in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from benchmarks.devices import add_device, join_default_group, joined, refuse_too_few
from benchmarks.parallel_peers import (
    SEED,
    Step,
    ddp_step,
    fsdp_step,
    pipeline_step,
    tensor_step,
    zero1_step,
)
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.config.optim_sections import AdamWConfig
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.nn.context import Context
from weft.nn.stage import MicroBatch
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, ScheduleName, StagePlan, ZeroLevel
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model

WORLD_SIZE = 2
SAMPLES = 8
"""Of one step of the whole job: microbatches of one in pipelines, halves in data parallelism."""
SEQ_LEN = 256
OPTIM = AdamWConfig(lr=1e-3)
STAGES = (range(6), range(6, 11))
"""Layers of the pipelines' stages; the head costs about as much as one more."""
LOSS_RTOL = {"fp32": 2e-5, "bf16": 3e-3}
"""Two steps apart in the order of additions alone; in bf16 in where they round, too."""
CHECKED_STEPS = 2


def spec() -> ModelSpec:
    """10.5 M parameters."""
    return replace(SIZES["demo-5m"], num_layers=11, d_ff=736, vocab_size=4096, seq_len=SEQ_LEN)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan, and what of PyTorch does the same."""

    name: str
    plan: Plan
    peers: Mapping[str, Callable[[ModelSpec, AdamWConfig, torch.device], Step]] = field(
        default_factory=dict
    )
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """Of Weft itself, to compare with."""

    @property
    def kind(self) -> str:
        """What ``--only`` picks."""
        return self.name.split()[0]

    @property
    def precision(self) -> Precision:
        return self.plan.pipelines[0].stages[0].precision


def shared(
    *, zero: ZeroLevel = 0, precision: Precision = "fp32", tp: int = 1, pieces: int = 1
) -> Plan:
    """One stage on both ranks."""
    mesh = Mesh.of(range(WORLD_SIZE), dp=WORLD_SIZE // tp, tp=tp)
    layers = (0, spec().num_layers)
    stage = StagePlan(mesh=mesh, layers=layers, precision=precision, zero=zero, pieces=pieces)
    pipeline = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
    return Plan(num_layers=spec().num_layers, pipelines=(pipeline,))


def staged(schedule: ScheduleName) -> Plan:
    """One stage on each rank."""
    stages = tuple(
        StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(layers.start, layers.stop))
        for rank, layers in enumerate(STAGES)
    )
    pipeline = PipelinePlan(stages=stages, samples=SAMPLES, microbatch=1, schedule=schedule)
    return Plan(num_layers=spec().num_layers, pipelines=(pipeline,))


def torch_pipeline(schedule: Any) -> Callable[[ModelSpec, AdamWConfig, torch.device], Step]:
    """The same stages and microbatches under one of PyTorch's schedules."""
    return partial(pipeline_step, schedule=schedule, layers=STAGES, num_microbatches=SAMPLES)


def cases() -> list[Case]:
    """Every comparison."""
    keep, free = partial(fsdp_step, reshard=False), partial(fsdp_step, reshard=True)
    f1b, gpipe = torch_pipeline(Schedule1F1B), torch_pipeline(ScheduleGPipe)
    dp_bf16 = {
        "DDP, autocast": partial(ddp_step, autocast=True),
        "FSDP2, mixed precision": partial(fsdp_step, reshard=False, mixed=True),
    }
    return [
        Case(name="dp fp32", plan=shared(), peers={"DDP": ddp_step, "FSDP2, kept whole": keep}),
        Case(name="dp bf16", plan=shared(precision="bf16"), peers=dp_bf16),
        Case(name="zero 1", plan=shared(zero=1), peers={"ZeroRedundancyOptimizer": zero1_step}),
        Case(name="zero 2", plan=shared(zero=2), peers={"FSDP2, kept whole": keep}),
        Case(name="zero 3", plan=shared(zero=3), peers={"FSDP2, resharded": free}),
        Case(name="tp 2", plan=shared(tp=2), peers={"DTensor": tensor_step}),
        Case(name="pp 1f1b", plan=staged("1f1b"), peers={"Schedule1F1B": f1b}),
        Case(name="pp gpipe", plan=staged("gpipe"), peers={"ScheduleGPipe": gpipe}),
        Case(name="pp zb-h1", plan=staged("zb-h1"), peers={"Schedule1F1B": f1b}),
        Case(
            name="pieces of tp 2",
            plan=shared(tp=2),
            plans={f"{n} pieces": shared(tp=2, pieces=n) for n in (2, 4)},
        ),
    ]


def weft_step(plan: Plan, comm: Comm) -> tuple[Step, Callable[[], None]]:
    """Weft with a plan; and how to wait for what its last update still sends."""
    plan = plan.each(lambda stage: replace(stage, device=comm.device.type))
    built = assemble_model(plan, spec(), comm, optim=OPTIM, seq_len=SEQ_LEN)
    fill(built.gradients, initial(SEED))
    parts = plan.rank_plan(comm.rank).microbatches()
    context = Context(positions=torch.arange(SEQ_LEN, device=comm.device)[None])

    def step(tokens: Tensor) -> Tensor:
        rows = [tokens[part.start : part.stop] for part in parts]
        batch = [
            MicroBatch(
                {
                    "tokens": own[:, :-1],
                    "targets": own[:, 1:],
                    "weights": torch.ones(len(own), SEQ_LEN, device=comm.device),
                },
                context,
            )
            for own in rows
        ]
        return built.engine.step(batch).loss / comm.world_size

    return step, built.gradients.fence


@dataclass(frozen=True, slots=True)
class Times:
    """One contender's turns on one rank, and its share of the first losses."""

    wall_s: list[float]
    cpu_s: list[float]
    losses: list[float]


def measure(
    address: RankAddress, number: int, rounds: int, steps: int, device: str
) -> dict[str, Times]:
    """All contenders of a case in turns; a round of warm-up is not counted."""
    warnings.filterwarnings("ignore")  # of PyTorch, about its own calls
    case = cases()[number]
    comm, platform = joined(address, device)
    join_default_group(address, platform)
    plans = {"weft": case.plan, **case.plans}
    built = {name: weft_step(plan, comm) for name, plan in plans.items()}
    contenders = {name: step for name, (step, _) in built.items()} | {
        n: make(spec(), OPTIM, comm.device) for n, make in case.peers.items()
    }
    times = {name: Times([], [], []) for name in contenders}
    generator = torch.Generator().manual_seed(0)
    for turn in range(rounds + 1):
        shape = (steps if turn else CHECKED_STEPS, SAMPLES, SEQ_LEN + 1)
        batches = torch.randint(0, spec().vocab_size, shape, generator=generator)
        batches = batches.to(comm.device)
        names = list(contenders)
        for name in names if turn % 2 else reversed(names):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses = [contenders[name](tokens) for tokens in batches]
            for _, settle in built.values():
                settle()
            platform.synchronize()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                times[name].wall_s.append(wall / steps)
                times[name].cpu_s.append(cpu / steps)
            else:
                times[name].losses.extend(map(float, losses))
    dist.destroy_process_group()
    comm.close()
    return times


@dataclass(frozen=True)
class Row:
    """One comparison, over both ranks, by contender and round."""

    case: Case
    wall_s: dict[str, list[float]]
    """Of the slower rank."""
    cpu_s: dict[str, list[float]]
    """Of both ranks together."""
    losses: dict[str, list[float]]

    @staticmethod
    def of(case: Case, ranks: Sequence[dict[str, Times]]) -> Row:
        """Of what the ranks measured.

        Raises:
            AssertionError: the contenders did not compute the same.
        """
        names = list(ranks[0])
        row = Row(
            case,
            {n: _over(max, [rank[n].wall_s for rank in ranks]) for n in names},
            {n: _over(sum, [rank[n].cpu_s for rank in ranks]) for n in names},
            {n: _over(sum, [rank[n].losses for rank in ranks]) for n in names},
        )
        for name, losses in row.losses.items():
            for ours, theirs in zip(row.losses["weft"], losses, strict=True):
                gap = abs(theirs / ours - 1)
                assert gap < LOSS_RTOL[case.precision], f"{case.name}: {name} {theirs}, {ours}"
        return row

    def to_json(self) -> dict[str, Any]:
        """The schema that every benchmark prints; ratios of time, so above 1 Weft is faster."""
        tokens = SAMPLES * SEQ_LEN
        speed = {n: tokens / statistics.median(seconds) for n, seconds in self.wall_s.items()}
        wall, cpu = _ratios(self.wall_s), _ratios(self.cpu_s)
        best = min(wall, key=lambda peer: wall[peer]["median"])
        return {
            "name": self.case.name,
            "ours": speed.pop("weft"),
            "theirs": speed,
            "ratio": wall[best]["median"],
            "ratios": wall,
            "cpu_ratios": cpu,
            "cpu_s": {n: statistics.median(seconds) for n, seconds in self.cpu_s.items()},
            "unit": "tokens/s",
            "spread": wall[best]["spread"],
        }


def _over(
    combine: Callable[[Sequence[float]], float], ranks: Sequence[Sequence[float]]
) -> list[float]:
    """One number a round from those of the ranks."""
    return [combine(column) for column in zip(*ranks, strict=True)]


def _ratios(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Theirs / ours of every peer: the median over rounds and its quartiles."""
    result = {}
    for peer in seconds:
        if peer != "weft":
            each = [t / w for t, w in zip(seconds[peer], seconds["weft"], strict=True)]
            low, _, high = statistics.quantiles(each, n=4)
            result[peer] = {"median": statistics.median(each), "spread": [low, high]}
    return result


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="dp,zero,tp,pp", help="kinds, and pieces, with commas")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    add_device(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        refuse_too_few(options.device, WORLD_SIZE)
    except ConfigError as error:
        parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = "1"
    records = []
    with WorkerPool() as pool:
        for number, case in enumerate(cases()):
            if case.kind not in options.only.split(","):
                continue
            args = (number, options.rounds, options.steps, options.device)
            ranks = pool.run(measure, *args, world_size=WORLD_SIZE, timeout_s=1800)
            record = Row.of(case, ranks).to_json()
            records.append(record)
            if not options.json:
                _print(record)
    if options.json:
        print(json.dumps(records, indent=2))


def _print(record: Mapping[str, Any]) -> None:
    name, cpu_s = record["name"], record["cpu_s"]
    print(f"{name}: Weft {record['ours']:.0f} tokens/s, {cpu_s['weft']:.2f} CPU s a step")
    for peer, speed in record["theirs"].items():
        wall, cpu = (record[key][peer] for key in ("ratios", "cpu_ratios"))
        words = [
            "{:.2f} ({:.2f} - {:.2f})".format(ratio["median"], *ratio["spread"])
            for ratio in (wall, cpu)
        ]
        print(f"    {peer}: {speed:.0f} tokens/s, {cpu_s[peer]:.2f} CPU s a step;", end=" ")
        print(f"ratio {words[0]}, of CPU time {words[1]}", flush=True)


if __name__ == "__main__":
    main()
