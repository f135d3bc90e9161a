"""A measured chip: how long its operations really take, by shape and dtype, and its links.

A profile replaces the roofline wherever a cost function is asked for. It interpolates between what
was measured, so it holds inside the range of the measurements and follows their trend outside.
``weft chips profile`` writes it as JSON; nothing here needs torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from typing import Literal, NamedTuple, TypeVar

from weft.cluster.cluster import Dtype
from weft.cost.memory import ACCELERATOR, BUCKET_BYTES, CPU, Overheads
from weft.cost.operators import PHASES, Op, Phase
from weft.cost.timing import Hardware, Software
from weft.cost.traffic import Fabric
from weft.recompute.core import GOES_ROUND

ADDED_BYTES = 12
"""Of one parameter: two gradients read, their sum written."""
SHARPNESS = 4
"""Power of the distance by which measured shapes lose their say."""


class Product(NamedTuple):
    """A linear layer's three products, in seconds: ``[m, k]`` times ``[k, n]`` and its backward."""

    dtype: Dtype
    m: int
    n: int
    k: int
    forward: float
    input_grad: float
    weight_grad: float

    @property
    def sides(self) -> tuple[int, int, int]:
        """``m``, ``n`` and ``k``."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> float:
        """Of one of the three."""
        return 2.0 * self.m * self.n * self.k

    def of(self, phase: Phase) -> float:
        """Seconds of one of the three."""
        return (self.forward, self.input_grad, self.weight_grad)[PHASES.index(phase)]


class AttentionTime(NamedTuple):
    """Attention as the runtime calls it, rotation included. Seconds for each FLOP that counts."""

    dtype: Dtype
    seq_len: int
    width: int
    """Channels of a head's key and value together."""
    forward: float
    backward: float


class MovingTime(NamedTuple):
    """An operation that is bound by memory, by its name in ``weft/cost/operators.py``."""

    name: str
    dtype: Dtype
    num_bytes: float
    """As ``Op.num_bytes`` counts them."""
    forward: float
    backward: float


Timed = TypeVar("Timed", Product, AttentionTime, MovingTime)
LinkKind = Literal["send", "all_reduce", "reduce_scatter", "all_gather", "exchange"]
"""What two ranks do; an exchange is what tensor parallelism does at the edge of a module."""


class LinkTime(NamedTuple):
    """One collective between two ranks."""

    kind: LinkKind
    num_bytes: float
    seconds: float


class Contention(NamedTuple):
    """So many ranks of the machine compute at once: each takes so many times as long."""

    ranks: int
    slowdown: float


class Part(NamedTuple):
    """A rank gets this part of the chip's time, in turns: its operations take so many times as much
    of that time, for caches are cold after every pause."""

    speed: float
    slowdown: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where, when and with what a profile was measured."""

    host: str
    cpu: str
    cores: int
    memory_gib: float
    device: str
    """Platform: cpu, cuda."""
    threads: int
    """Of one rank."""
    torch: str
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """What calibration with real runs adds to a profile; see ``weft chips calibrate``."""

    compute: float = 1.0
    """Computing takes so many times as long as the operations of the profile."""
    step_s: float = 0.0
    """Seconds of every step besides what is predicted."""
    runtime_bytes: float = 0.0
    """Memory of a rank besides what is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One rank's chip: a whole GPU, or so many threads of a processor."""

    name: str
    """Of the chip, as pools name it."""
    machine: Machine
    products: tuple[Product, ...]
    attention: tuple[AttentionTime, ...]
    rounds: tuple[AttentionTime, ...] = ()
    """Of attention while keys go round two ranks of a processor, by the tokens of one."""
    moving: tuple[MovingTime, ...]
    links: tuple[LinkTime, ...] = ()
    contention: tuple[Contention, ...] = ()
    parts: tuple[Part, ...] = ()
    launch_s: float
    """The least that any operation takes."""
    memory_bytes_s: float
    """Reading and writing long arrays."""
    sending_bytes_s: float = 0.0
    """Of sums with another rank, by the time that they take of the rank's own core."""
    update_bytes_s: float
    """The optimizer's update with what comes before it: norm of the gradients, and clipping."""
    accumulate_bytes_s: float
    """Adding gradients of one microbatch to those before it."""
    step_s: float = 0.0
    """Once a step, whatever the model."""
    layer_s: float = 0.0
    """Of one layer's forward, whatever its size; see ``Software.layer_s``."""
    cast_layer_s: float = 0.0
    """See ``Software.cast_layer_s``."""
    host_layer_s: float = 0.0
    """Of one layer's forward, what its host takes to begin it; see ``Software.host_layer_s``."""
    host_fp8_layer_s: float = 0.0
    """Likewise where products are of eight bits."""
    rounds_in_products: bool = False
    """Products in eight bits were measured with what rounds their factors."""
    runtime_bytes: float
    """Memory of a rank that has joined a job and holds nothing yet."""
    fragments: float = 0.0
    """As of ``Overheads``; 0: as usual."""
    gap: float = 1.0
    """A whole block takes so many times as long as its operations by themselves."""
    cast_gap: float = 1.0
    """Where products have fewer bits than parameters, so many times as long besides."""
    other_cores: float = 0.0
    """That worked for others before or after it was measured: rates may be far off."""
    corrections: Corrections = field(default_factory=Corrections)
    speed: float = 1.0
    """Part of the chip that a rank gets."""
    ranks: int = 1
    """Ranks of the machine that compute at once."""

    def __hash__(self) -> int:
        """Short: costs are kept by profile, and asked for often."""
        return hash((self.name, self.machine, self.corrections, self.speed, self.ranks))

    def scaled(self, speed: float) -> Profile:
        """The same chip when a rank gets a part of its time. Links and memory stay as they are."""
        return replace(self, speed=self.speed * speed)

    def shared(self, ranks: int) -> Profile:
        """One of so many ranks of the machine that compute at once."""
        return replace(self, ranks=ranks)

    @property
    def slowdown(self) -> float:
        """Of every operation, because of the others, the part of the chip and what a run showed."""
        points = [(point.ranks, point.slowdown) for point in self.contention]
        others = _between(points, self.ranks) if points else 1.0
        return others * self._in_turns * self.corrections.compute / self.speed

    @property
    def _in_turns(self) -> float:
        """As ``Part.slowdown``; the whole chip has no turns."""
        return _between([*self.parts, (1.0, 1.0)], self.speed)

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        """Seconds of one phase of an operation."""
        casts = 1.0 if dtype == "fp32" else self.cast_gap
        return _seconds(self, op, phase, dtype) * casts * self.slowdown

    def moving_seconds(self, num_bytes: float) -> float:
        """As an optimizer moves bytes."""
        return num_bytes / self.update_bytes_s * self.slowdown

    def peak_flops(self, dtype: Dtype) -> float:
        """The best of the measured products, FLOP/s; 0 where none was measured."""
        rates = [point.flops / point.forward for point in self.products if point.dtype == dtype]
        return max(rates, default=0.0) * self.speed

    def link_seconds(self, kind: LinkKind, num_bytes: float) -> float:
        """Of one collective between two ranks."""
        points = [(link.num_bytes, link.seconds) for link in self.links if link.kind == kind]
        longest = max((size for size, _ in points), default=0.0)
        return _between(points, num_bytes) * max(num_bytes / longest, 1.0) if points else 0.0

    def _sent_bytes_s(self, kind: LinkKind) -> float | None:
        """The best rate: of what two ranks have, each sends half."""
        rates = (link.num_bytes / 2 / link.seconds for link in self.links if link.kind == kind)
        return max(rates, default=None)

    def hardware(self, chips_per_node: int) -> Hardware:
        """What costs need to know of a pool of such chips on one machine."""
        latency, rate = self._link()
        fabric = Fabric(
            chips_per_node=chips_per_node,
            inside_bytes_s=rate,
            across_bytes_s=rate,
            inside_latency_s=latency,
            across_latency_s=latency,
            exchange_bytes_s=self._sent_bytes_s("exchange"),
            exchange_latency_s=self.link_seconds("exchange", 1.0),
            scatter_bytes_s=self._sent_bytes_s("reduce_scatter"),
            gather_bytes_s=self._sent_bytes_s("all_gather"),
        )
        return Hardware(chip=self, fabric=fabric, software=self.software)

    @property
    def software(self) -> Software:
        """Of Weft on this part of the chip. On a processor, sending takes time from computing."""
        hidden = 0.0 if self.machine.device == "cpu" else 0.8
        return Software(
            slowdown=self.gap,
            tensor_hidden=0.0,
            border_hidden=hidden,
            data_hidden=hidden,
            last_bytes=BUCKET_BYTES,
            step_s=self.step_s * self.slowdown + self.corrections.step_s,
            layer_s=self.layer_s * self.slowdown,
            cast_layer_s=self.cast_layer_s * self.slowdown,
            host_layer_s=self.host_layer_s,
            host_fp8_layer_s=self.host_fp8_layer_s,
            stage_layers=1.0,
            accumulate_bytes=ADDED_BYTES * self.update_bytes_s / self.accumulate_bytes_s,
            reduces_each_backward=True,
        )

    @property
    def overheads(self) -> Overheads:
        """Memory of a rank besides what a plan asks for."""
        usual = CPU if self.machine.device == "cpu" else ACCELERATOR
        own = self.runtime_bytes + self.corrections.runtime_bytes
        return replace(usual, runtime_bytes=own, fragments=self.fragments or usual.fragments)

    @property
    def link_bytes_s(self) -> float:
        """Of long messages between two ranks of the machine."""
        return self._link()[1]

    def _link(self) -> tuple[float, float]:
        """(seconds, bytes/s): the shortest time that any message took, and the best rate."""
        sends = [(link.num_bytes, link.seconds) for link in self.links if link.kind == "send"]
        if not sends:
            return 1e-4, self.memory_bytes_s / 4
        return min(took for _, took in sends), max(size / took for size, took in sends)


@lru_cache(maxsize=1 << 14)
def _seconds(profile: Profile, op: Op, phase: Phase, dtype: Dtype) -> float:
    flops = op.phase_flops(phase)
    if op.name == "casts":  # of eight bits, which come with each product
        return 0.0
    if op.kind == "elementwise":
        return _moving(profile, op, phase, dtype)
    if not flops:
        return 0.0
    if op.kind == "attention":
        return _attention(profile, op, phase, dtype)
    return _product(profile, op, phase, dtype)


def _product(profile: Profile, op: Op, phase: Phase, dtype: Dtype) -> float:
    """FLOPs at the best rate, times what near shapes took longer than that.

    Sides beyond all that was measured count as the last that was. In eight bits are linear layers
    but for the head, and the rounding comes on top.
    """
    if dtype == "fp8":
        if op.kind == "matmul" and op.name != "head":
            rounding = 0.0 if profile.rounds_in_products else _rounding(profile, op, phase)
            return _multiplied(profile, op, phase, dtype) + rounding
        dtype = "bf16"
    return _multiplied(profile, op, phase, dtype)


def _rounding(profile: Profile, op: Op, phase: Phase) -> float:
    """Of ``weft/parallel/fp8/linear.py``: what is new in a phase is read twice in 16 bits and
    written in eight; what is multiplied along another side is turned."""
    x, w, g = op.m * op.k, op.n * op.k, op.m * op.n
    rounded = {"forward": x + w, "input_grad": g + w, "weight_grad": 0.0}[phase]
    turned = {"forward": 0.0, "input_grad": w, "weight_grad": x + g}[phase]
    return (5 * rounded + 2 * turned) * op.repeat / profile.memory_bytes_s


def _multiplied(profile: Profile, op: Op, phase: Phase, dtype: Dtype) -> float:
    points = _in_dtype(profile.products, dtype)
    best = max(point.flops / point.forward for point in points)
    ranges = zip(
        (op.m, op.n, op.k), zip(*(point.sides for point in points), strict=True), strict=True
    )
    sides = [log(min(max(side, min(range_)), max(range_))) for side, range_ in ranges]
    weights = total = 0.0
    for point in points:
        seconds = point.of(phase)
        expected = point.flops / best + profile.launch_s
        away = sum((a - log(b)) ** 2 for a, b in zip(sides, point.sides, strict=True))
        weight = 1 / (away + 1e-6) ** (SHARPNESS / 2)
        weights += weight
        total += weight * log(seconds / expected)
    expected = op.phase_flops(phase) / best + profile.launch_s * op.repeat
    return expected * exp(total / weights)


def _in_dtype(points: Sequence[Timed], dtype: Dtype) -> list[Timed]:
    """What was measured in it; of fp16 and fp8 where nothing was, that of bf16; else all."""
    asked = (dtype, "bf16") if dtype in ("fp16", "fp8") else (dtype,)
    found = ([point for point in points if point.dtype == each] for each in asked)
    return next(filter(None, found), list(points))


def _attention(profile: Profile, op: Op, phase: Phase, dtype: Dtype) -> float:
    measured = (op.name == GOES_ROUND and profile.rounds) or profile.attention
    points = _in_dtype(measured, dtype)
    nearest = min((abs(log(point.width / op.k)), point.width) for point in points)[1]
    column = 3 if phase == "forward" else 4
    curve = [(p.seq_len, float(p[column])) for p in points if p.width == nearest]
    return op.flops * _between(curve, op.m)


def _moving(profile: Profile, op: Op, phase: Phase, dtype: Dtype) -> float:
    if phase == "weight_grad" or not op.num_bytes:
        return 0.0
    named = _in_dtype([point for point in profile.moving if point.name == op.name], dtype)
    if not named:
        return op.phase_bytes(phase) * (2 if dtype == "fp32" else 1) / profile.memory_bytes_s
    column = 3 if phase == "forward" else 4
    curve = [(p.num_bytes, float(p[column])) for p in named]
    return max(_along(curve, op.num_bytes), profile.launch_s)


def _between(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Of a measured curve, straight between its points on two logarithmic scales; flat outside."""
    points = sorted(curve)
    at = bisect_left(points, (x, 0.0))
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1 : at + 1]
    part = (log(x) - log(x0)) / (log(x1) - log(x0))
    return exp(log(y0) + part * (log(y1) - log(y0)))


def _along(curve: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Seconds for so many bytes; outside the curve in proportion to its end."""
    sizes = [x for x, _ in curve]
    nearest = min(max(num_bytes, min(sizes)), max(sizes))
    return _between(curve, nearest) * num_bytes / nearest
