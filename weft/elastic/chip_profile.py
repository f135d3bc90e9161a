"""Measure this machine's chip and links, in processes like those of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from weft.cluster.cluster import Dtype, Node
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.members import Channel
from weft.config.optim_sections import AdamWConfig
from weft.cost.memory import Overheads, memory_of_plan
from weft.cost.operators import PHASES, Op
from weft.cost.profile import (
    AttentionTime,
    Contention,
    LinkKind,
    LinkTime,
    Machine,
    MovingTime,
    Product,
    Profile,
)
from weft.elastic import measure
from weft.elastic.pool import WorkerPool
from weft.elastic.rounds import measure_rounds
from weft.models.registry import default_family
from weft.nn.context import Context
from weft.nn.stage import MicroBatch
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.platform.base import Platform
from weft.platform.registry import PLATFORMS, platform_named
from weft.simulate.known import core_name, knowledge_of_local, local_view
from weft.simulate.step import time_of_plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model

Say = Callable[[str], None]

KINDS: tuple[LinkKind, ...] = ("send", "all_reduce", "reduce_scatter", "all_gather", "exchange")
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
LONG_BYTES, LEAST_SUMS = 1 << 22, 9
LEAST_GAP = 0.05
"""Where a chip waits for its host nearly all the time, noise may say that operations take less than
nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A small real job of one stage."""

    spec: ModelSpec
    micro: int
    """Samples of a microbatch, for each replica."""
    microbatches: int
    mesh: Mesh = field(default_factory=lambda: Mesh.of((0,)))
    precision: Precision = "fp32"

    def plan(self, device: str) -> Plan:
        """All of it on the mesh."""
        stage = StagePlan(
            mesh=self.mesh,
            layers=(0, self.spec.num_layers),
            device=device,
            precision=self.precision,
            compile=self.precision != "fp32" and PLATFORMS[device].compiles,
        )
        micro = self.micro * self.mesh.size("dp")
        samples = micro * self.microbatches
        pipeline = PipelinePlan(stages=(stage,), samples=samples, microbatch=micro)
        return Plan(num_layers=self.spec.num_layers, pipelines=(pipeline,))


_SIZES = default_family().sizes
_NARROW = replace(
    _SIZES["debug-1m"], d_model=32, d_ff=64, d_head=16, num_heads=2, vocab_size=64, seq_len=32
)
SHORT = Sample(spec=replace(_NARROW, num_layers=1), micro=1, microbatches=1)
"""Tells what every step takes."""
DEEP = Sample(spec=replace(_NARROW, num_layers=12), micro=1, microbatches=8)
"""Tells what every layer takes."""
WHOLE = Sample(
    spec=replace(_SIZES["demo-5m"], vocab_size=2048, num_layers=3), micro=2, microbatches=4
)
"""Tells how much longer operations take one after another than by themselves, and beside others."""
LARGE = Sample(
    spec=replace(_SIZES["tinyllama-1.1b"], num_layers=2, seq_len=2048),
    micro=4,
    microbatches=2,
)
"""Likewise on an accelerator, in about 6 GiB."""
SLIGHT = replace(WHOLE, spec=replace(WHOLE.spec, num_layers=1), micro=1)
HEAVY = replace(WHOLE, spec=replace(WHOLE.spec, num_layers=6), micro=4, microbatches=2)
"""Tell what a process has besides what lives in it: whatever that is, and in parts of it."""
PEAK_STEPS = 8
"""An allocator takes more for some steps."""
LOOP_BYTES = 5.4 * 2**20
"""Of the loop of training, which those jobs have not: samples ahead, logs. Measured of a model that
is next to nothing, by one rank and by each of two."""


def profile_chip(node: Node, *, device: str, quick: bool, say: Say) -> Profile:
    """Measure one rank's chip, and the links between two; in processes of their own."""
    dtypes = dtypes_of(node, device)
    ranks = node.cores if device == "cpu" else len(node.chips)
    with WorkerPool() as pool:
        runtime = pool.run(measure_peak, device, SHORT, world_size=1)[0]  # before anything else
        say("products, attention, and what memory bounds")
        found = pool.run(measure_alone, device, dtypes, quick, world_size=1)[0]
        heads = found.pop("heads")
        profile = Profile(
            name=core_name(node) if device == "cpu" else node.chips[0].name,
            machine=Machine(
                host=node.host,
                cpu=node.cpu,
                cores=node.cores,
                memory_gib=node.memory_gib,
                device=device,
                threads=1,
                torch=str(torch.__version__),
                date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            ),
            runtime_bytes=runtime,
            **found,
        )
        profile = replace(profile, moving=(*profile.moving, *_losses(profile, heads)))
        say("real steps of small models" if device == "cpu" else "real steps")
        rounds = 3 if quick else 10
        if device == "cpu":
            profile = _fitted(profile, node, pool, rounds=rounds)
            if node.cpu_bf16:
                profile = _casting(profile, node, pool, rounds=rounds)
            profile = _allocating(profile, min(ranks, 2))
        else:
            profile = _busy(profile, node, pool, rounds=rounds)
        return _beside_others(profile, node, pool, ranks, quick, say) if ranks > 1 else profile


def dtypes_of(node: Node, device: str) -> tuple[Dtype, ...]:
    """What is measured: the last is what steps are usually computed in."""
    if device == "cpu":
        return ("fp32", "bf16") if node.cpu_bf16 else ("fp32",)
    return ("fp32", "bf16", "fp16") if node.chips[0].emulates_bf16 else ("fp32", "bf16")


def _beside_others(
    profile: Profile, node: Node, pool: WorkerPool, ranks: int, quick: bool, say: Say
) -> Profile:
    """Links, and what ranks of one processor take from each other: they share memory, and who sends
    computes less."""
    device = profile.machine.device
    say("links between ranks")
    links = pool.run(measure_links, device, quick, world_size=2)[0]
    profile = replace(profile, links=tuple(links))
    if device == "cpu":
        sending = pool.run(measure_sending, device, world_size=2)
        profile = replace(profile, sending_bytes_s=min(sending))
        say("real steps of ranks that compute and talk at once")
        profile = _in_company(profile, node, pool, ranks, rounds=6 if quick else 15)
        say("attention whose keys go round two ranks")
        dtypes = tuple(dict.fromkeys(point.dtype for point in profile.attention))
        rounds = pool.run(measure_rounds, device, dtypes, quick, world_size=2)[0]
        profile = replace(profile, rounds=_alone(profile, rounds))
    return profile


def _alone(profile: Profile, rounds: Sequence[AttentionTime]) -> tuple[AttentionTime, ...]:
    """As if each of both ranks had been by itself."""
    slower = profile.shared(2).slowdown
    return tuple(
        t._replace(forward=t.forward / slower, backward=t.backward / slower) for t in rounds
    )


def measure_peak(address: RankAddress, device: str, sample: Sample) -> float:
    """Most memory of a rank that trains this first of all; ``SHORT`` is next to nothing."""
    real_steps(address, device, sample, PEAK_STEPS)
    return platform_named(device).peak_memory_gib() * 2**30


def _allocating(profile: Profile, ranks: int) -> Profile:
    """With what a processor's rank takes besides what it asks for, by real jobs: code and memory of
    kernels and of talking, and what its allocator cannot use again."""

    def peak(sample: Sample, many: int = 1) -> float:
        with WorkerPool() as pool:  # processes that have done nothing yet
            taken: list[float] = pool.run(measure_peak, "cpu", sample, world_size=many)
            return max(taken)

    found = []
    for sample in (SLIGHT, HEAVY):
        asked, whole = (
            memory_of_plan(sample.plan("cpu"), sample.spec, sample.spec.seq_len, {"cpu": usual})
            for usual in (Overheads(), Overheads(fragments=1.0))
        )
        found.append((whole[0].total - asked[0].total, peak(sample) - asked[0].total))
    (few, less), (many, more) = found
    part = max((more - less) / (many - few), 0.0)
    both = replace(SHORT, mesh=Mesh.of(tuple(range(ranks)), dp=ranks))
    talking = max(peak(both, ranks) - profile.runtime_bytes, 0.0)
    runtime = max(less - part * few, profile.runtime_bytes) + talking + LOOP_BYTES
    return replace(profile, runtime_bytes=runtime, fragments=part)


def measure_alone(
    address: RankAddress, device: str, dtypes: Sequence[Dtype], quick: bool
) -> dict[str, Any]:
    """What one rank finds out by itself, as fields of a profile, and ``heads``."""
    platform = platform_named(device)
    full, less = measure.FULL, measure.QUICK
    if device != "cpu":
        full, less = measure.ACCELERATED, replace(measure.ACCELERATED, least_s=less.least_s)
    extent = less if quick else full
    width, wide = extent.widths
    # A processor's casts are measured by real steps.
    narrow = measure.TORCH_DTYPE["fp32" if device == "cpu" else dtypes[-1]]
    watch = measure.Stopwatch(platform, platform.device(address.local_rank), extent.least_s)
    return {
        "products": tuple(_products(watch, dtypes, extent)),
        "rounds_in_products": _rounds_in_products(platform, dtypes),
        "attention": tuple(p for dtype in dtypes for p in measure.attention(watch, dtype, extent)),
        "moving": tuple(p for dtype in dtypes for p in measure.moving(watch, dtype, extent)),
        "heads": tuple(
            (Op("head", "matmul", *vocab, width), dtype, seconds)
            for dtype, vocab in product(dtypes, extent.vocabs)
            for seconds in measure.as_fits(
                partial(measure.head_seconds, watch, dtype, *vocab, width)
            )
        ),
        "launch_s": measure.launch_seconds(watch),
        "memory_bytes_s": measure.copy_bytes_s(watch, extent.copied),
        "update_bytes_s": measure.update_bytes_s(watch, extent.updated, (wide, width), narrow),
        "accumulate_bytes_s": measure.accumulate_bytes_s(watch, extent.added, narrow),
    }


def _rounds_in_products(platform: Platform, dtypes: Sequence[Dtype]) -> bool:
    """Products in eight bits are measured as they are emulated. What is compiled rounds in fewer
    passes, and without instructions for bf16 one takes minutes."""
    return "bf16" in dtypes and not (platform.compiles or platform.multiplies_fp8())


def _products(
    watch: measure.Stopwatch, dtypes: Sequence[Dtype], extent: measure.Extent
) -> Iterator[Product]:
    for dtype in dtypes:
        yield from measure.products(watch, dtype, extent)
    if watch.platform.multiplies_fp8():
        yield from measure.eight_bit_products(watch, extent)
    elif _rounds_in_products(watch.platform, dtypes):
        yield from measure.emulated_products(watch)


def _losses(profile: Profile, heads: Sequence[tuple[Op, Dtype, float]]) -> Iterator[MovingTime]:
    """The loss is what a head takes besides its three products."""
    for head, dtype, seconds in heads:
        products = sum(profile.seconds(head, phase, dtype) for phase in PHASES)
        rest = max(seconds - products, seconds / 20)
        yield MovingTime("loss", dtype, 10.0 * head.m * head.n, rest / 3, rest * 2 / 3)


def _fitted(profile: Profile, node: Node, pool: WorkerPool, *, rounds: int) -> Profile:
    """What a step, and a layer, take besides their operations, from real steps."""
    device = profile.machine.device
    short, deep, whole = (
        pool.run(real_steps, device, sample, rounds, world_size=1)[0]
        for sample in (SHORT, DEEP, WHOLE)
    )
    profile = replace(profile, layer_s=_each_layer_s(profile, node, DEEP, deep))
    profile = replace(profile, step_s=max(short - predicted_s(profile, node, SHORT), 0.0))
    once = predicted_s(replace(profile, gap=0.0), node, WHOLE)
    return replace(profile, gap=_gap(whole, once, predicted_s(profile, node, WHOLE)))


def _busy(profile: Profile, node: Node, pool: WorkerPool, *, rounds: int) -> Profile:
    """Likewise of a device that computes while its host begins the next operations: small layers
    take what the host takes, and large ones nothing besides what they compute."""
    device = profile.machine.device
    measured = {point.dtype for point in profile.products}
    usual: Precision = "fp16" if "fp16" in measured else "bf16"
    samples = [replace(sample, precision=usual) for sample in (SHORT, DEEP, LARGE)]
    short, deep, large = samples
    short_s, deep_s, large_s = (
        pool.run(real_steps, device, sample, rounds, world_size=1)[0] for sample in samples
    )
    without, with_gap = (predicted_s(replace(profile, gap=gap), node, large) for gap in (0.0, 1.0))
    host_s = _host_layer_s(short, deep, short_s, deep_s)
    profile = replace(profile, gap=_gap(large_s, without, with_gap), host_layer_s=host_s)
    if "fp8" in measured and not profile.rounds_in_products:
        profile = replace(profile, host_fp8_layer_s=_host_fp8(pool, device, rounds))
    return replace(profile, step_s=max(short_s - predicted_s(profile, node, short), 0.0))


def _host_fp8(pool: WorkerPool, device: str, rounds: int) -> float:
    short, deep = (replace(sample, precision="fp8") for sample in (SHORT, DEEP))
    taken = [pool.run(real_steps, device, s, rounds, world_size=1)[0] for s in (short, deep)]
    return _host_layer_s(short, deep, *taken)


def _host_layer_s(short: Sample, deep: Sample, short_s: float, deep_s: float) -> float:
    return max(deep_s - short_s, 0.0) / (_layers(deep) - _layers(short)) / 3


def _casting(profile: Profile, node: Node, pool: WorkerPool, *, rounds: int) -> Profile:
    """What real steps take besides where parameters of 32 bits are cast to 16 for products."""
    deep, whole = (replace(sample, precision="bf16") for sample in (DEEP, WHOLE))
    deep_s, whole_s = (
        pool.run(real_steps, profile.machine.device, sample, rounds, world_size=1)[0]
        for sample in (deep, whole)
    )
    for _ in range(4):  # each is a little of the other's
        bare = replace(profile, cast_layer_s=0.0)
        profile = replace(profile, cast_layer_s=_each_layer_s(bare, node, deep, deep_s))
        once, twice = (
            predicted_s(replace(profile, cast_gap=gap), node, whole) for gap in (0.0, 1.0)
        )
        profile = replace(profile, cast_gap=_gap(whole_s, once, twice))
    return profile


def _gap(took_s: float, without_s: float, with_s: float) -> float:
    """How many times as long operations take; a step without and with them is predicted so."""
    return max((took_s - without_s) / (with_s - without_s), LEAST_GAP)


def _each_layer_s(profile: Profile, node: Node, sample: Sample, took_s: float) -> float:
    """Of a layer's forward: what a step took besides all that is predicted."""
    return max(took_s - predicted_s(profile, node, sample), 0.0) / _layers(sample) / 3


def _layers(sample: Sample) -> int:
    """That a step of the sample goes through, counting its ends."""
    return sample.microbatches * (sample.spec.num_layers + 2)


def predicted_s(profile: Profile, node: Node, sample: Sample) -> float:
    """Of a step of the sample, by a profile of this machine."""
    plan = sample.plan(profile.machine.device)
    view = local_view(node, profile, plan.world_size)
    known = knowledge_of_local(profile, plan.world_size)
    spec = sample.spec
    return time_of_plan(plan, spec, view, seq_len=spec.seq_len, knowledge=known).step_s


def real_steps(address: RankAddress, device: str, sample: Sample, rounds: int) -> float:
    """Seconds of one step of training: of a rank alone on a processor those that it computed."""
    platform = platform_named(device)
    where = platform.device(address.local_rank)
    alone = device == "cpu" and address.world_size == 1
    clock = time.thread_time if alone else time.perf_counter
    spec, shape = sample.spec, (sample.micro, sample.spec.seq_len)
    comm = join(address, device=where, **platform.joining())
    built = assemble_model(sample.plan(device), spec, comm, optim=AdamWConfig(), seq_len=shape[1])
    fill(built.gradients, initial(0))
    tokens = torch.arange(shape[0] * shape[1], device=where).view(shape) % spec.vocab_size
    places = Context(positions=torch.arange(shape[1], device=where)[None])
    ones = torch.ones(shape, device=where)
    batch = MicroBatch({"tokens": tokens, "targets": tokens, "weights": ones}, places)
    found = []
    for _ in range(rounds + 2):
        start = clock()
        built.engine.step([batch] * sample.microbatches)
        platform.synchronize()
        found.append(clock() - start)
    comm.close()
    return median(found[2:])


def _in_company(
    profile: Profile, node: Node, pool: WorkerPool, ranks: int, *, rounds: int
) -> Profile:
    """How much longer computing takes each rank beside others, and an exchange in a real step."""
    device = profile.machine.device

    def company(sample: Sample, changed: Callable[[float], Profile]) -> float:
        """How many times as long, so that a real step of the sample is predicted right."""
        many = len(sample.mesh.ranks)
        took: float = max(pool.run(real_steps, device, sample, rounds, world_size=many))
        once, twice = (predicted_s(changed(times), node, sample) for times in (1.0, 2.0))
        return max(1 + (took - once) / (twice - once), 1.0)

    found = [Contention(1, 1.0)]
    for many in sorted({2, ranks}):
        replicas = replace(WHOLE, mesh=Mesh.of(tuple(range(many)), dp=many))
        slower = company(
            replicas, lambda times: replace(profile, contention=(Contention(1, times),))
        )
        found.append(Contention(many, slower))
    profile = replace(profile, contention=tuple(found))
    halves = replace(WHOLE, mesh=Mesh.of((0, 1), tp=2))
    return _exchanging(profile, company(halves, lambda times: _exchanging(profile, times)))


def _exchanging(profile: Profile, times: float) -> Profile:
    """The same where exchanges take so many times as long."""
    links = (
        link._replace(seconds=link.seconds * times) if link.kind == "exchange" else link
        for link in profile.links
    )
    return replace(profile, links=tuple(links))


def measure_links(address: RankAddress, device: str, quick: bool) -> list[LinkTime]:
    """Collectives between two ranks; the lower quartile, for others may use the machine."""
    platform = platform_named(device)
    where = platform.device(address.local_rank)
    comm = join(address, device=where, **platform.joining())
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


def measure_sending(address: RankAddress, device: str) -> float:
    """Bytes of sums a second of the time that all threads of this process compute."""
    platform = platform_named(device)
    comm = join(address, device=platform.device(address.local_rank), **platform.joining())
    flat = torch.zeros(LONG_BYTES // 4, device=platform.device(address.local_rank))
    found = []
    for _ in range(LEAST_SUMS):
        comm.barrier(name="links")
        start = time.process_time()
        _talk(comm, "all_reduce", flat)
        found.append(max(time.process_time() - start, 1e-9))
    comm.close()
    return flat.nbytes / median(found)


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
            comm.exchange(parts, [part.shape for part in parts], name="links", group=world)()
        case "send":
            channel = Channel(world, 0)
            if comm.rank == 0:
                comm.send([(1, flat)], channel=channel, name="links")()
            else:
                comm.receive([(0, flat)], channel=channel, name="links")()
