"""What dividing samples' tokens gains and costs on this machine, for ``benchmarks.sequence``.

Ranks have a thread each. One process and several take turns, and the ideal is one process's time
divided by the ranks. The memory of the longest step is a real limit of the kernel's, the same for
each rank, on what it may ask for beyond model and optimizer.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.axes.registry import AXES
from weft.cluster.cluster_file import ClusterFile
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.optim_sections import AdamWConfig
from weft.data.dataset import PackedSpec
from weft.data.inside import lengths_of, places_by_work
from weft.elastic.pool import RanksFailedError, WorkerPool
from weft.lab.rehearsal import Rehearsal, rehearse
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.sizes import SIZES
from weft.nn.causal_attention import causal_attention
from weft.nn.context import Context
from weft.nn.documents import Documents, Packed
from weft.nn.full_attention import attention_by_length
from weft.nn.stage import MicroBatch
from weft.parallel.cp.ring import Ring
from weft.parallel.cp.rows import Rows
from weft.parallel.cp.ulysses import Attend, Ulysses
from weft.parallel.runtime import AxisGroup, Sum
from weft.plan.layout import Dim
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import cut

HEADS, KV_HEADS, D_HEAD = 8, 4, 64
IN_RING = 4
"""Ranks whose keys go round."""
CPU = torch.device("cpu")
WAYS: dict[str, Callable[[Sum], Attend]] = {
    "ring": lambda total: Ring(total, causal=True),
    "rows": lambda total: Rows(total, causal=True),
    "heads": lambda total: Ulysses(total, causal_attention),
}
DEMO = replace(SIZES["demo-5m"], vocab_size=4096)
WIDE = replace(
    DEMO, d_ff=1024, num_layers=4, num_heads=2, num_kv_heads=1, d_head=32, vocab_size=512
)
"""Much memory and few operations a token, so that long samples do not take long."""


class Taken(NamedTuple):
    """Medians of one rank."""

    wall_s: float
    cpu_s: float


def timed(call: Callable[[], object], repeats: int) -> Taken:
    """After one that is not counted."""
    walls, cpus = [], []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Taken(statistics.median(walls[1:]), statistics.median(cpus[1:]))


def inputs(seq: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, of so many tokens."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, seq, many, D_HEAD, requires_grad=True) for many in heads]


def attend(address: RankAddress, way: str, seq: int, repeats: int) -> Taken:
    """Attention forward and backward of one sample, of all ranks together."""
    torch.set_num_threads(1)
    comm = join(address, backend="gloo", device=CPU, timeout_s=600)
    ranks = tuple(range(address.world_size))
    comm.open_groups([ranks])
    dim = Dim(name="seq", size=seq)
    parts = tuple(AXES["cp"].part(dim, len(ranks), rank) for rank in ranks)
    group = AxisGroup(comm, ranks, near_ways=len(ranks) if way == "heads" else 1)
    core = (
        WAYS[way](Sum(group, parts[address.rank], parts, None)) if ranks[1:] else causal_attention
    )
    *given, grad = inputs(sum(map(len, parts[address.rank])))
    found = timed(lambda: torch.autograd.grad(core(*given, None), given, grad), repeats)
    comm.close()
    return found


class Alone(Comm):
    """One rank of several that are not there: what it gets is there at once, and zeros."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def exchange(self, _: Any, sizes: Any, **__: Any) -> Any:
        room = [torch.zeros(size) for size in sizes]
        return lambda: room


def played(seq: int, repeats: int) -> dict[str, Any]:
    """What each of two ranks of a ring computes beside half of what one process does, by the least
    processor time of turns: other work on the machine does not count, and messages do not."""
    torch.set_num_threads(1)
    dim, ranks = Dim(name="seq", size=seq), (0, 1)
    parts = tuple(AXES["cp"].part(dim, len(ranks), rank) for rank in ranks)
    rings: list[Attend] = [
        Ring(Sum(AxisGroup(Alone(rank), ranks), parts[rank], parts, None), causal=True)
        for rank in ranks
    ]
    cores: list[Attend] = [causal_attention, *rings]
    least = [float("inf")] * len(cores)
    for _ in range(repeats + 1):
        for number, core in enumerate(cores):
            *given, grad = inputs(seq // 2 if number else seq)
            begun = time.process_time()
            torch.autograd.grad(core(*given, None), given, grad)
            least[number] = min(least[number], time.process_time() - begun)
    one, *two = least
    return {
        "name": f"attention, {seq} tokens, each of 2 ranks played alone",
        "one, s of CPU": one,
        **{f"rank {rank}, of ideal": one / 2 / each for rank, each in enumerate(two)},
    }


def played_inside(packed: PackedSpec, ranks: int, samples: int) -> dict[str, Any]:
    """Processor time of each rank of a ring for attention inside documents, forward and backward,
    each played by this process: most beside the mean, and all of them together, by the least of
    two turns a sample."""
    torch.set_num_threads(1)
    dim, every = Dim(name="seq", size=packed.seq_len), tuple(range(ranks))
    parts = tuple(AXES["cp"].part(dim, ranks, rank) for rank in every)
    rings = [
        Ring(Sum(AxisGroup(Alone(rank), every), parts[rank], parts, None), causal=True)
        for rank in every
    ]
    plain, found = packed.open(), {"by length": list[float](), "by work": list[float]()}
    seconds = dict.fromkeys(found, 0.0)
    for number in range(samples):
        segments = plain.batch([number]).segments
        assert segments is not None, "documents are not masked"
        moved = places_by_work(lengths_of(segments[0]).tolist(), parts)[None]
        for way, places in (("by length", None), ("by work", moved)):
            documents = Documents.of(segments, CPU, places).packed
            each = [_least(ring, documents, packed.seq_len // ranks) for ring in rings]
            found[way].append(max(each) / statistics.mean(each))
            seconds[way] += sum(each)
    return {
        "name": f"attention of packed documents, {packed.seq_len} tokens, {ranks} ranks played",
        **{f"{way}, most over the mean": statistics.mean(found[way]) for way in found},
        **{f"{way}, most": max(found[way]) for way in found},
        "by work, seconds of all beside by length": seconds["by work"] / seconds["by length"],
    }


def _least(ring: Attend, documents: Packed, seq: int) -> float:
    """Processor seconds of attention."""
    least = float("inf")
    for _ in range(2):
        *given, grad = inputs(seq)
        begun = time.process_time()
        torch.autograd.grad(ring(*given, documents), given, grad)
        least = min(least, time.process_time() - begun)
    return least


class Around(NamedTuple):
    """Medians of one rank."""

    wall_s: float
    waited_s: float
    """For messages."""


def around(address: RankAddress, seq: int, block_s: float, repeats: int) -> Around:
    """Keys and values of one sample round a ring, forward, and backward with their gradients, by
    ranks that sleep so long for a block, as virtual chips do."""
    torch.set_num_threads(1)
    comm = join(address, backend="gloo", device=CPU, timeout_s=600)
    ranks = tuple(range(address.world_size))
    comm.open_groups([ranks])
    dim = Dim(name="seq", size=seq)
    parts = tuple(AXES["cp"].part(dim, len(ranks), rank) for rank in ranks)
    ring = Ring(Sum(AxisGroup(comm, ranks), parts[address.rank], parts, None), causal=True)
    own = torch.zeros(2 * KV_HEADS, seq // len(ranks), D_HEAD)
    waits = []

    def gradient(_: object, held: Tensor) -> Tensor:
        time.sleep(block_s / 2 if held is own else block_s)
        return torch.zeros_like(held)

    def both() -> None:
        before = comm.recorder.waited["keys"]
        for _ in ring.round(own, ring.all):
            time.sleep(block_s)
        ring.returned(own, ring.all, gradient, lambda _: time.sleep(block_s / 2))
        waits.append(comm.recorder.waited["keys"] - before)

    found = timed(both, repeats)
    comm.close()
    return Around(found.wall_s, statistics.median(waits[1:]))


def here(pool: WorkerPool, seq: int, block_s: float, repeats: int) -> list[Around]:
    """By ranks of this machine."""
    return pool.run(around, seq, block_s, repeats, world_size=IN_RING, timeout_s=600)


def in_lab(gbit: float, seq: int, block_s: float, repeats: int) -> list[Around]:
    """By hosts of a lab, a rank each, with links of so many Gbit/s each way. Needs root on
    Linux."""
    hosts = [
        {"name": f"h{number}", "chips": [{"kind": "any", "speed": 0.45}]}
        for number in range(IN_RING)
    ]
    asked = {"hosts": hosts, "links": {"between": {"gbit": gbit}}}
    with TemporaryDirectory() as folder:
        rank = (
            sys.executable,
            "-m",
            "benchmarks.long_sequences",
            folder,
            *map(str, (seq, block_s, repeats)),
        )
        cluster = ClusterFile.model_validate(asked)
        rehearse(Rehearsal(cluster=cluster, command=rank, out=Path(folder), quiet=True), print)
        found = sorted(Path(folder).glob("rank*.found"))
        assert len(found) == IN_RING, "a rank has failed"
        return [Around(*json.loads(each.read_text())) for each in found]


def one_in_lab() -> None:
    """A rank there, as ``python -m benchmarks.long_sequences FOLDER SEQ BLOCK_S REPEATS``."""
    folder, seq, block_s, repeats = sys.argv[1:]
    address = RankAddress.from_environment()
    assert address is not None, "it is the lab's to start this"
    found = around(address, int(seq), float(block_s), int(repeats))
    Path(folder, f"rank{address.rank}.found").write_text(json.dumps(found))


def behind_blocks(
    taken: Callable[[int, float, int], list[Around]], where: str, seq: int, repeats: int
) -> dict[str, Any]:
    """How much of a ring's traffic is hidden where a block takes longer than what travels beside
    it, which is keys and gradients of twice the size in backward: by what the rank that waits most
    waits for messages, and by all that is not sleep, with what ranks copy and add themselves."""

    def most(block_s: float) -> Around:
        return Around(*map(max, zip(*taken(seq, block_s, repeats), strict=True)))

    alone = most(0.0)
    block_s = 1.5 * alone.wall_s / (IN_RING - 1)
    with_blocks = most(block_s)
    beside = with_blocks.wall_s - 2 * IN_RING * block_s
    return {
        "name": f"a ring of {IN_RING} for {seq} tokens, behind blocks of sleep{where}",
        "traffic alone, s": alone.wall_s,
        "of it waited for": alone.waited_s,
        "a block, s": block_s,
        "waited with blocks": with_blocks.waited_s,
        "hidden": 1 - with_blocks.waited_s / alone.waited_s,
        "beside blocks": beside,
        "hidden by the wall": 1 - beside / alone.wall_s,
    }


def plan_of(spec: DecoderSpec, cp: int, samples: int, recompute: str) -> Plan:
    """One stage, a sample a micro-batch."""
    mesh = Mesh.of(range(cp), cp=cp) if cp > 1 else Mesh.of((0,), dp=1)
    stage = StagePlan(mesh=mesh, layers=(0, spec.num_layers), recompute=recompute)
    pipeline = PipelinePlan(stages=(stage,), samples=samples, microbatch=1)
    return Plan(num_layers=spec.num_layers, pipelines=(pipeline,))


def step(
    address: RankAddress,
    spec: DecoderSpec,
    samples: int,
    repeats: int,
    room: int = 0,
    recompute: str = "off",
) -> Taken:
    """A training step. ``room``: bytes that it may ask for beyond what is there before; 0: any."""
    torch.set_num_threads(1)
    comm = join(address, backend="gloo", device=CPU, timeout_s=600)
    seq = spec.seq_len
    plan = plan_of(spec, address.world_size, samples, recompute)
    optim = AdamWConfig(lr=1e-3, state_folder=gettempdir())
    built = assemble_model(plan, spec, comm, optim=optim, seq_len=seq)
    fill(built.gradients, initial(1))
    context = Context(positions=torch.arange(seq)[None])
    tokens = torch.randint(spec.vocab_size, (samples, seq + 1))
    batch = [
        MicroBatch(
            {"tokens": s[:, :-1], "targets": s[:, 1:], "weights": torch.ones(1, seq)}, context
        )
        for s in tokens.split(1)
    ]

    def train() -> None:
        built.engine.step(batch)
        built.gradients.fence()

    before = resource.getrlimit(resource.RLIMIT_DATA)
    if room:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + room, before[1]))
    try:
        found = timed(train, repeats)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    comm.close()
    return found


def data_bytes() -> int:
    """Private memory that this process has asked for, as the kernel's limit counts it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) << 10


def beside_the_ideal(pool: WorkerPool, lengths: tuple[int, ...], repeats: int) -> Iterator[Any]:
    """Attention on two ranks beside half the time of one."""
    for seq in lengths:
        (one,) = pool.run(attend, "ring", seq, repeats, world_size=1, timeout_s=600)
        record: dict[str, Any] = {"name": f"attention, {seq} tokens, 2 ranks", "one, s": one.wall_s}
        for way in WAYS:
            two = pool.run(attend, way, seq, repeats, world_size=2, timeout_s=600)
            record[f"{way}, of ideal"] = one.wall_s / 2 / max(each.wall_s for each in two)
            record[f"{way}, by CPU time"] = one.cpu_s / sum(each.cpu_s for each in two)
        yield record


def by_length(pool: WorkerPool, lengths: tuple[int, ...], repeats: int) -> Iterator[Any]:
    """A training step of equally many tokens, in longer and longer samples."""
    for seq in lengths:
        spec, samples = replace(DEMO, seq_len=seq), max(lengths) // seq
        one, two = (
            pool.run(step, spec, samples, repeats, world_size=ranks, timeout_s=600)
            for ranks in (1, 2)
        )
        wall_s = max(each.wall_s for each in two)
        yield {
            "name": f"a step of {samples} samples of {seq} tokens",
            "one, s": one[0].wall_s,
            "two ranks, s": wall_s,
            "of ideal": one[0].wall_s / 2 / wall_s,
            "by CPU time": one[0].cpu_s / sum(each.cpu_s for each in two),
        }


def longest(ranks: int, room_mib: int, unit: int, recompute: str) -> int:
    """Tokens of the longest sample that so many ranks train on, in units."""
    low, high = 0, 0
    while not high or high - low > max(1, low // 8):
        middle = (low + high) // 2 if high else 2 * low or 1
        spec = replace(WIDE, seq_len=middle * unit)
        with WorkerPool() as pool:
            try:
                asked = (spec, 1, 1, room_mib << 20, recompute)
                pool.run(step, *asked, world_size=ranks, timeout_s=300)
                low = middle
            except RanksFailedError as error:
                if "memory" not in str(error):
                    raise
                high = middle
    return low * unit


def in_memory(room_mib: int, recompute: str) -> dict[str, Any]:
    """Of one rank and of four, each with as much."""
    found = {ranks: longest(ranks, room_mib, 1024, recompute) for ranks in (1, 4)}
    return {
        "name": f"longest sample, {room_mib} MiB a rank beyond the model, recompute: {recompute}",
        "one rank, tokens": found[1],
        "four ranks, tokens": found[4],
        "times": found[4] / found[1],
    }


def unpadded(packed: PackedSpec, repeats: int) -> dict[str, Any]:
    """Attention inside packed documents: blocks of queries, and a call for each length."""
    torch.set_num_threads(1)
    plain, ratios, numbers = packed.open(), [], []
    for place in range(4):
        (micro,) = cut(plain.batch([place]), [1], CPU)
        assert micro.context.documents is not None, "documents are not masked"
        documents = micro.context.documents.packed
        numbers.append(len(documents.first.unique()))
        *given, grad = inputs(packed.seq_len)
        seconds = [
            timed(lambda a=a, g=given, d=grad: torch.autograd.grad(a(*g), g, d), repeats).wall_s
            for a in (
                lambda q, k, v, d=documents: causal_attention(q, k, v, d),
                lambda q, k, v, d=documents: attention_by_length(q, k, v, d, causal=True),
            )
        ]
        ratios.append(seconds[1] / seconds[0])
    return {
        "name": f"attention of packed documents, {packed.seq_len} tokens a sample",
        "documents": statistics.mean(numbers),
        "a call for each length, beside blocks": statistics.median(ratios),
    }


if __name__ == "__main__":
    one_in_lab()
