"""Measure this machine's chip and links, in processes like those of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from weft.cluster.cluster import Dtype, Node
from weft.comm.channel import Channel
from weft.comm.place import Place
from weft.config.sections import OptimConfig
from weft.cost.operators import Op
from weft.cost.profile import LinkKind, LinkTime, Machine, MovingTime, Profile, Together
from weft.cost.rates import PHASES
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.known import core_name, knowledge_of_local, local_view
from weft.simulate.step import time_of_plan

if TYPE_CHECKING:
    from torch import Tensor

    from weft.comm.comm import Comm

Say = Callable[[str], None]

KINDS: tuple[LinkKind, ...] = ("send", "all_reduce", "reduce_scatter", "all_gather", "exchange")
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
HEADS = ((512, 2048), (2048, 4096))
"""Tokens and vocabulary of the heads that are measured, at a width of ``HEAD_WIDTH``."""
HEAD_WIDTH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A small real job of one rank."""

    spec: ModelSpec
    micro: int
    microbatches: int

    def plan(self, device: str) -> Plan:
        """Everything on rank 0."""
        stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, self.spec.num_layers), device=device)
        samples = self.micro * self.microbatches
        pipeline = PipelinePlan(stages=(stage,), samples=samples, microbatch=self.micro)
        return Plan(num_layers=self.spec.num_layers, pipelines=(pipeline,))


_NARROW = replace(
    SIZES["debug-1m"], d_model=32, d_ff=64, d_head=16, num_heads=2, vocab_size=64, seq_len=32
)
SHORT = Sample(spec=replace(_NARROW, num_layers=1), micro=1, microbatches=1)
"""Tells what every step takes."""
DEEP = Sample(spec=replace(_NARROW, num_layers=12), micro=1, microbatches=8)
"""Tells what every layer takes."""
WHOLE = Sample(
    spec=replace(SIZES["demo-5m"], vocab_size=2048, num_layers=3), micro=2, microbatches=4
)
"""Tells how much longer operations take one after another than by themselves."""


def profile_chip(node: Node, *, device: str, quick: bool, say: Say) -> Profile:
    """Measure one rank's chip, and the links between two; in processes of their own."""
    fast_bf16 = device != "cpu" or node.cpu_bf16
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16") if fast_bf16 else ("fp32",)
    ranks = node.cores if device == "cpu" else len(node.chips)
    with WorkerPool() as pool:
        runtime = pool.run(measure_runtime, device, world_size=1)[0]  # before anything else
        say("products, attention, and what memory bounds")
        found = pool.run(measure_alone, device, dtypes, quick, world_size=1, timeout_s=600)[0]
        heads = found.pop("heads")
        profile = Profile(
            name=core_name(node) if device == "cpu" else node.chips[0].name,
            machine=_machine(node, device),
            runtime_bytes=runtime,
            **found,
        )
        profile = replace(profile, moving=(*profile.moving, *_losses(profile, heads)))
        say("real steps of small models")
        profile = _fitted(profile, node, pool, rounds=3 if quick else 10)
        if ranks > 1:
            say("ranks that compute at once, and their links")
            profile = replace(profile, together=tuple(_together(pool, device, ranks, quick)))
            links = pool.run(measure_links, device, quick, world_size=2, timeout_s=300)[0]
            profile = replace(profile, links=tuple(links))
    return profile


def measure_runtime(place: Place, device: str) -> float:
    """Most memory of a rank that trains next to nothing."""
    from weft.platform.registry import platform_named

    real_steps(place, device, SHORT, 2)
    return platform_named(device).peak_memory_gib() * 2**30


def _machine(node: Node, device: str) -> Machine:
    from torch import __version__

    return Machine(
        host=node.host,
        cpu=node.cpu,
        cores=node.cores,
        memory_gib=node.memory_gib,
        device=device,
        threads=1,
        torch=str(__version__),
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )


def measure_alone(
    place: Place, device: str, dtypes: Sequence[Dtype], quick: bool
) -> dict[str, Any]:
    """What one rank finds out by itself, as fields of a profile, and ``heads``."""
    from weft.platform import measure
    from weft.platform.registry import platform_named

    platform = platform_named(device)
    extent = measure.FULL if device == "cpu" else measure.ACCELERATED
    extent = measure.QUICK if quick else extent
    watch = measure.Stopwatch(platform, platform.device(place.local_rank), extent.least_s)
    found: dict[str, Any] = {"products": (), "attention": (), "moving": (), "heads": ()}
    for dtype in dtypes:
        found["products"] += tuple(measure.products(watch, dtype, extent))
        found["attention"] += tuple(measure.attention(watch, dtype, extent))
        found["moving"] += tuple(measure.moving(watch, dtype, extent))
        for tokens, vocab in HEADS:
            seconds = measure.head_seconds(watch, dtype, tokens, vocab, HEAD_WIDTH)
            found["heads"] += ((dtype, tokens, vocab, seconds),)
    return {
        **found,
        "launch_s": measure.launch_seconds(watch),
        "memory_bytes_s": measure.copy_bytes_s(watch, 1 << 26),
        "update_bytes_s": measure.update_bytes_s(watch, 4_000_000),
        "accumulate_bytes_s": measure.accumulate_bytes_s(watch, 500_000),
    }


def _losses(
    profile: Profile, heads: Sequence[tuple[Dtype, int, int, float]]
) -> Iterator[MovingTime]:
    """The loss is what a head takes besides its three products."""
    for dtype, tokens, vocab, seconds in heads:
        head = Op("head", "matmul", tokens, vocab, HEAD_WIDTH)
        products = sum(profile.seconds(head, phase, dtype) for phase in PHASES)
        rest = max(seconds - products, seconds / 20)
        yield MovingTime("loss", dtype, 10.0 * tokens * vocab, rest / 3, rest * 2 / 3)


def _fitted(profile: Profile, node: Node, pool: WorkerPool, *, rounds: int) -> Profile:
    """What a step, and a layer, take besides their operations, from real steps."""
    device = profile.machine.device
    short, deep, whole = (
        pool.run(real_steps, device, sample, rounds, world_size=1)[0]
        for sample in (SHORT, DEEP, WHOLE)
    )
    layers = DEEP.microbatches * (DEEP.spec.num_layers + 2)
    per_layer = max(deep - _predicted(profile, node, DEEP), 0.0) / layers / 3
    profile = replace(profile, layer_s=per_layer)
    profile = replace(profile, step_s=max(short - _predicted(profile, node, SHORT), 0.0))
    once = _predicted(replace(profile, gap=0.0), node, WHOLE)
    return replace(profile, gap=(whole - once) / (_predicted(profile, node, WHOLE) - once))


def _predicted(profile: Profile, node: Node, sample: Sample) -> float:
    view = local_view(node, profile, 1)
    plan = sample.plan(profile.machine.device)
    known = knowledge_of_local(profile, 1)
    spec = sample.spec
    return time_of_plan(plan, spec, view, seq_len=spec.seq_len, knowledge=known).step_s


def real_steps(place: Place, device: str, sample: Sample, rounds: int) -> float:
    """Seconds of one step of training: on a processor those that this process computed."""
    import torch

    from weft.comm.comm import Comm
    from weft.nn.context import Context
    from weft.parallel.pipeline.executor import MicroBatch
    from weft.platform.registry import platform_named
    from weft.train.build import build, fill, initial

    platform = platform_named(device)
    where = platform.device(place.local_rank)
    clock = time.thread_time if device == "cpu" else time.perf_counter
    spec, shape = sample.spec, (sample.micro, sample.spec.seq_len)
    built = build(
        sample.plan(device), spec, Comm(device=where), optim=OptimConfig(), seq_len=shape[1]
    )
    fill(built.gradients, initial(0))
    tokens = torch.arange(shape[0] * shape[1], device=where).view(shape) % spec.vocab_size
    batch = MicroBatch(tokens, tokens, torch.ones(shape, device=where), Context())
    found = []
    for _ in range(rounds + 2):
        start = clock()
        built.engine.step([batch] * sample.microbatches)
        platform.synchronize()
        found.append(clock() - start)
    return median(found[2:])


def _together(pool: WorkerPool, device: str, ranks: int, quick: bool) -> Iterator[Together]:
    """How much longer a step takes each rank when others compute beside it."""
    rounds = 4 if quick else 12
    alone = pool.run(real_steps, device, WHOLE, rounds, world_size=1)[0]
    yield Together(1, 1.0)
    for many in sorted({2, ranks}):
        slowest = max(pool.run(real_steps, device, WHOLE, rounds, world_size=many))
        yield Together(many, max(slowest / alone, 1.0))


def measure_links(place: Place, device: str, quick: bool) -> list[LinkTime]:
    """Collectives between two ranks; the lower quartile, for others may use the machine."""
    import torch

    from weft.comm.join import join
    from weft.platform.registry import platform_named

    platform = platform_named(device)
    where = platform.device(place.local_rank)
    comm = join(place, backend=platform.collective_backend, device=where, timeout_s=60)
    comm.open_gathering([comm.world])
    found = []
    for kind in KINDS:
        for size in LINK_BYTES:
            flat = torch.zeros(size // 4, device=where)
            times = []
            for _ in range(5 if quick else 15):
                comm.barrier(name="links")
                start = time.perf_counter()
                _talk(comm, kind, flat)
                platform.synchronize()
                times.append(time.perf_counter() - start)
            found.append(LinkTime(kind, float(size), max(quantiles(times[1:], n=4)[0], 1e-9)))
    comm.close()
    return found


def _talk(comm: Comm, kind: LinkKind, flat: Tensor) -> None:
    """One collective of all ranks on ``flat``, as the runtime does it."""
    world = comm.world
    match kind:
        case "all_reduce":
            comm.all_reduce(flat, name="links")
        case "reduce_scatter":
            own = flat.new_empty(flat.numel() // len(world))
            comm.reduce_scatter(flat, own, name="links", group=world)()
        case "all_gather":
            comm.all_gather(flat, name="links", group=world)()
        case "exchange":
            parts = list(flat.view(len(world), -1))
            comm.exchange(parts, [part.shape for part in parts], name="links", group=world)
        case "send":
            channel = Channel(world, 0)
            if comm.rank == 0:
                comm.send([(1, flat)], channel=channel, name="links")()
            else:
                comm.receive([(0, flat)], channel=channel, name="links")()
