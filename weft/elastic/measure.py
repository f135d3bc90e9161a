"""How long a device takes for the operations that training is made of, one by one.

On a processor seconds are those that the process itself computed, so that other work on the machine
does not enter. Everything is called as the runtime calls it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod
from statistics import median
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.cluster.cluster import Dtype
from weft.cost.profile import ADDED_BYTES, AttentionTime, MovingTime, Product
from weft.nn.causal_attention import causal_attention
from weft.nn.losses import linear_cross_entropy
from weft.nn.norm import RMSNorm
from weft.nn.rope import Rotation, rotate, rotation
from weft.parallel.fp8.linear import Factors, Multiply
from weft.parallel.fp8.rounding import Scaled, Spans, scaled
from weft.parallel.fp8.rounding import product as multiply
from weft.platform.base import Platform
from weft.precision.registry import PRECISIONS

T = TypeVar("T")

TORCH_DTYPE: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
RING_BYTES = 24 << 20
"""Operands, and results, that take turns: more than a core's own cache holds."""
MAX_TURNS = 12
LEAST_REPEATS = 5
ROW_S, LONGEST_ROW = 2e-3, 32
"""So long, or so many, calls follow one another on a device by itself."""
OCCUPIED_S, OCCUPYING_BYTES = 8e-3, 1 << 28
"""It is given other work for so long before, in arrays of this size, while its host begins them."""
FEW_QUERIES = (4, 1024)
"""Heads and tokens of attention in fp32, where many a kernel keeps all scores."""
IN_BLOCKS = ("activation", "plain activation", "norms and residuals")
"""What is compiled where blocks are."""
UPDATE_BYTES = 32
"""Of one parameter, as ``Software.optimizer_bytes`` counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much is measured."""

    rows: tuple[int, ...]
    """Of products: tokens."""
    weights: tuple[tuple[int, int], ...]
    """Of products: columns of the result, and what is summed over."""
    seq_lens: tuple[int, ...]
    heads: tuple[int, ...]
    """Channels of one head."""
    queries: tuple[int, int]
    """Of attention: heads, and about how many tokens in all."""
    tokens: tuple[int, ...]
    """Of what memory bounds."""
    widths: tuple[int, int] = (256, 704)
    """Of what memory bounds: of a model, and of its feed-forward."""
    vocabs: tuple[tuple[int, int], ...] = ((512, 2048), (512, 4096), (2048, 4096))
    """Of heads with their losses: tokens and vocabulary, at the width of a model."""
    copied: int = 1 << 26
    """Bytes of a long array."""
    updated: int = 4_000_000
    """Parameters of an optimizer."""
    added: int = 500_000
    """Gradients that come to others."""
    least_s: float
    """Time given to one measurement; at least three repeats are made."""


FULL = Extent(
    rows=(32, 128, 512, 2048),
    weights=(
        (128, 128),
        (256, 256),
        (704, 256),
        (256, 704),
        (512, 512),
        (1376, 512),
        (512, 1376),
        (1024, 1024),
        (2816, 1024),
        (2048, 128),
        (4096, 256),
    ),
    seq_lens=(64, 128, 256, 512, 1024, 2048),
    heads=(32, 64, 128),
    queries=FEW_QUERIES,
    tokens=(128, 512, 2048, 8192),
    least_s=0.05,
)
QUICK = Extent(
    rows=(64, 1024),
    weights=((256, 256), (704, 256), (256, 704), (1024, 1024), (4096, 256)),
    seq_lens=(128, 256, 512),
    heads=(64,),
    queries=FEW_QUERIES,
    tokens=(256, 2048),
    least_s=0.01,
)
ACCELERATED = Extent(
    rows=(512, 4096, 16384),
    weights=((1024, 1024), (4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192), (32000, 4096)),
    seq_lens=(512, 2048, 4096, 8192),
    heads=(64, 128),
    queries=(32, 16384),
    tokens=(1024, 16384),
    widths=(4096, 11008),
    vocabs=((4096, 32000), (8192, 32000), (8192, 128_000)),
    copied=1 << 30,
    updated=256_000_000,
    added=64_000_000,
    least_s=0.05,
)
"""For devices that are busy with much at once alone, and whose caches hold what is smaller."""


class Stopwatch:
    """Repeats a call and says what it takes on one device.

    Training meets its operands and results in memory that it last used long ago, so calls take
    turns with several of each. Where a device computes while its host begins the next operations,
    its own time counts, without that of its host.
    """

    def __init__(self, platform: Platform, device: torch.device, least_s: float) -> None:
        self.device = device
        self.platform = platform
        self._least_s = least_s
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._kept: deque[object] = deque(maxlen=1)

    def seconds(self, call: Callable[[int], object], *, num_bytes: float = RING_BYTES) -> float:
        """Median of several repeats, after as many that do not count as fill the memory.

        ``call`` is given the number of the repeat; its result, of about ``num_bytes``, is kept for
        a while.
        """
        many = _turns(num_bytes)
        self._kept = deque(maxlen=many)
        for number in range(many + 1):
            self._kept.append(call(number))
        row = 1
        if not self.platform.is_host:
            row = min(int(ROW_S / max(self._in_a_row(call, 0, 1), 1e-9)) + 1, LONGEST_ROW)
        found: list[float] = []
        while len(found) < LEAST_REPEATS or sum(found) < self._least_s:
            found.append(self._in_a_row(call, len(found) * row, row))
        self._kept.clear()
        return max(median(found) / row, 1e-9)

    def _in_a_row(self, call: Callable[[int], object], first: int, many: int) -> float:
        """Seconds of so many calls, one after another."""
        self.platform.synchronize()
        if self.platform.is_host:
            start = self._clock()
            self._kept.extend(map(call, range(first, first + many)))
            return self._clock() - start
        self.occupy()
        begun, ended = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        begun.record()
        self._kept.extend(map(call, range(first, first + many)))
        ended.record()
        self.platform.synchronize()
        return begun.elapsed_time(ended) / 1e3

    def occupy(self) -> None:
        """Give the device something to do until its host has begun what is measured."""
        for _ in range(self._occupying):
            self._array.add_(1)

    @cached_property
    def _array(self) -> Tensor:
        return torch.zeros(OCCUPYING_BYTES // 4, device=self.device)

    @cached_property
    def _occupying(self) -> int:
        """Passes over the array."""
        for count in (1, 8):  # the first one warms up
            self.platform.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                self._array.add_(1)
            self.platform.synchronize()
            each_s = (time.perf_counter() - start) / count
        return int(OCCUPIED_S / max(each_s, 1e-6)) + 1

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values that are no trouble to any operation; on a device that takes more power, and then
        more time, for unlike ones, unlike."""
        if self.platform.is_host:
            return torch.full(shape, 0.01, dtype=dtype)
        return torch.randn(shape, dtype=dtype, device=self.device) * 0.01

    def ring(self, *shape: int, dtype: torch.dtype = torch.float32) -> Ring:
        """Alike tensors to take turns with."""
        return Ring.of(self.tensor(*shape, dtype=dtype))

    def both_ways(self, call: Callable[[int], Tensor], *inputs: Ring) -> tuple[float, float]:
        """Forward, and the gradients of ``inputs``."""
        for ring in inputs:
            for each in ring.all:
                each.requires_grad_()
        forward = self.seconds(call, num_bytes=call(0).nbytes)
        results = [call(number) for number in range(len(inputs[0].all))]
        grad = torch.ones_like(results[0])

        def back(number: int) -> object:
            at = number % len(results)
            given = [ring[at] for ring in inputs]
            return torch.autograd.grad(results[at], given, grad, retain_graph=True)

        return forward, self.seconds(back, num_bytes=sum(x[0].nbytes for x in inputs))


@dataclass(frozen=True, slots=True)
class Ring:
    """Like tensors; one after another by number, for ever."""

    all: list[Tensor]

    @staticmethod
    def of(one: Tensor) -> Ring:
        """It, and copies."""
        return Ring([one, *(one.clone() for _ in range(_turns(one.nbytes) - 1))])

    def __getitem__(self, number: int) -> Tensor:
        return self.all[number % len(self.all)]


def _turns(num_bytes: float) -> int:
    return int(min(max(RING_BYTES // max(num_bytes, 1), 2), MAX_TURNS))


def as_fits(measured: Callable[[], T]) -> Iterator[T]:
    """It, or nothing where the device has no room for it: small cards leave out large shapes."""
    with suppress(torch.OutOfMemoryError):
        yield measured()


def products(watch: Stopwatch, dtype: Dtype, extent: Extent) -> Iterator[Product]:
    """Linear layers, each phase by itself."""
    for n, k in extent.weights:
        w = watch.ring(n, k, dtype=TORCH_DTYPE[dtype])
        for m in extent.rows:
            yield from as_fits(partial(_product, watch, dtype, w, m))


def eight_bit_products(watch: Stopwatch, extent: Extent) -> Iterator[Product]:
    """Likewise of what was rounded and turned before."""
    for (n, k), m in product(extent.weights, extent.rows):
        yield from as_fits(partial(_eight_bit_product, watch, m, n, k))


def _eight_bit_product(watch: Stopwatch, m: int, n: int, k: int) -> Product:
    def seconds(rows: int, columns: int, along: int, of: torch.dtype) -> float:
        left = _rounded(watch, rows, along, of)
        right = _rounded(watch, columns, along, torch.float8_e4m3fn)
        return watch.seconds(
            lambda i: multiply(left(i), right(i), torch.bfloat16, by_tensor_cores=True),
            num_bytes=2 * rows * columns,
        )

    factors, gradients = torch.float8_e4m3fn, torch.float8_e5m2
    forward, input_grad = seconds(m, n, k, factors), seconds(m, k, n, gradients)
    return Product("fp8", m, n, k, forward, input_grad, seconds(n, k, m, gradients))


def emulated_products(watch: Stopwatch) -> Iterator[Product]:
    """Likewise where nothing multiplies eight bits: of a few layers, with what rounds factors."""
    for (n, k), m in product(QUICK.weights, QUICK.rows):
        yield from as_fits(partial(_emulated_product, watch, m, n, k))


def _emulated_product(watch: Stopwatch, m: int, n: int, k: int) -> Product:
    asked = PRECISIONS["fp8"].products
    assert asked is not None, "fp8 multiplies in eight bits"
    factors = Factors(asked)
    x, w = watch.ring(1, m, k, dtype=torch.bfloat16), watch.ring(n, k, dtype=torch.bfloat16)

    def layer(number: int) -> Tensor:
        made: Tensor = Multiply.apply(x[number], w[number], None, factors, None)  # type: ignore[no-untyped-call]
        return made

    forward, input_grad = watch.both_ways(layer, x)
    _, both = watch.both_ways(layer, x, w)
    return Product("fp8", m, n, k, forward, input_grad, max(both - input_grad, both / 10))


def _rounded(
    watch: Stopwatch, rows: int, columns: int, dtype: torch.dtype
) -> Callable[[int], Scaled]:
    one = scaled(watch.tensor(rows, columns, dtype=torch.bfloat16), dtype, Spans(whole=(0, 1)))
    values = Ring.of(one.values)
    return lambda number: Scaled(values[number], one.scale)


def _product(watch: Stopwatch, dtype: Dtype, w: Ring, m: int) -> Product:
    n, k = w[0].shape
    x, g = (watch.ring(m, width, dtype=w[0].dtype) for width in (k, n))
    forward = watch.seconds(lambda i: F.linear(x[i], w[i]), num_bytes=g[0].nbytes)
    input_grad = watch.seconds(lambda i: g[i] @ w[i], num_bytes=x[0].nbytes)
    weight_grad = watch.seconds(lambda i: g[i].T @ x[i], num_bytes=w[0].nbytes)
    return Product(dtype, m, n, k, forward, input_grad, weight_grad)


def attention(watch: Stopwatch, dtype: Dtype, extent: Extent) -> Iterator[AttentionTime]:
    """Turning queries and keys, then mixing values; two queries share a key."""
    for d_head, seq in product(extent.heads, extent.seq_lens):
        queries = extent.queries if dtype != "fp32" else FEW_QUERIES
        yield from as_fits(partial(_attention, watch, dtype, d_head, seq, *queries))


def _attention(
    watch: Stopwatch, dtype: Dtype, d_head: int, seq: int, heads: int, tokens: int
) -> AttentionTime:
    kind, batch = TORCH_DTYPE[dtype], max(1, tokens // seq)
    q = watch.ring(batch, seq, heads, d_head, dtype=kind)
    k = watch.ring(batch, seq, heads // 2, d_head, dtype=kind)
    v = watch.ring(batch, seq, heads // 2, d_head, dtype=kind)
    positions = torch.arange(seq, device=watch.device)[None]
    turn = rotation(positions, d_head, theta=1e4, scaling=None, dtype=kind)
    forward, backward = watch.both_ways(partial(_attend, q, k, v, turn), q, k, v)
    flops = 2 * seq * (seq / 2) * 2 * d_head * heads * batch
    return AttentionTime(dtype, seq, 2 * d_head, forward / flops, backward / flops)


def _attend(q: Ring, k: Ring, v: Ring, turn: Rotation, number: int) -> Tensor:
    queries, keys = rotate(q[number], turn), rotate(k[number], turn)
    return causal_attention(queries, keys, v[number], None)


def moving(watch: Stopwatch, dtype: Dtype, extent: Extent) -> Iterator[MovingTime]:
    """What is bound by memory: one layer's activation, norms and residuals, and the embedding."""
    norm = RMSNorm(extent.widths[0], 1e-5).to(watch.device, TORCH_DTYPE[dtype])
    table = watch.ring(4096, extent.widths[0], dtype=TORCH_DTYPE[dtype])
    for rows in extent.tokens:
        for times in as_fits(partial(_moving, watch, dtype, (rows, extent.widths[1]), norm, table)):
            yield from times


def _moving(
    watch: Stopwatch, dtype: Dtype, wide: tuple[int, int], norm: nn.Module, table: Ring
) -> list[MovingTime]:
    rows, narrow = wide[0], (wide[0], table[0].shape[1])
    gate, up, x = (watch.ring(*shape, dtype=table[0].dtype) for shape in (wide, wide, narrow))
    ids = torch.arange(rows, device=watch.device) % len(table[0])

    def residual(x: Tensor) -> Tensor:
        once = x + norm(x)
        result: Tensor = once + norm(once)
        return result

    calls: Sequence[tuple[str, float, Callable[..., Tensor], Sequence[Ring]]] = (
        ("activation", 6.0 * prod(wide), lambda gate, up: F.silu(gate) * up, (gate, up)),
        ("plain activation", 4.0 * prod(wide), partial(F.gelu, approximate="tanh"), (up,)),
        ("norms and residuals", 20.0 * prod(narrow), residual, (x,)),
        ("last norm", 4.0 * prod(narrow), norm, (x,)),
        ("embedding", 4.0 * prod(narrow), partial(F.embedding, ids), (table,)),
    )
    found = []
    for name, num_bytes, call, inputs in calls:
        compiled = watch.platform.compiles and name in IN_BLOCKS
        found.append(MovingTime(name, dtype, num_bytes, *_both_ways(watch, call, inputs, compiled)))
    return found


def _both_ways(
    watch: Stopwatch, call: Callable[..., Tensor], inputs: Sequence[Ring], compiled: bool
) -> tuple[float, float]:
    """``watch.both_ways`` of a function of tensors. Backward is called again and again here, so
    compiled code may not give its buffers away."""
    if not compiled:
        return watch.both_ways(partial(_of_turn, call, inputs), *inputs)
    from torch._functorch import config  # PyTorch's compiler, which most runs do without

    with config.patch(donated_buffer=False):
        return watch.both_ways(
            partial(_of_turn, torch.compile(call, dynamic=False), inputs), *inputs
        )


def _of_turn(call: Callable[..., Tensor], inputs: Sequence[Ring], number: int) -> Tensor:
    return call(*(ring[number] for ring in inputs))


def head_seconds(watch: Stopwatch, dtype: Dtype, tokens: int, vocab: int, d_model: int) -> float:
    """Head and loss with their gradients, which are all made in the forward."""
    kind = TORCH_DTYPE[dtype]
    hidden = watch.ring(tokens, d_model, dtype=kind)
    weight = watch.tensor(vocab, d_model, dtype=kind).requires_grad_()
    targets = torch.arange(tokens, device=watch.device) % vocab
    weights = watch.tensor(tokens)
    num_bytes = weight.nbytes + hidden[0].nbytes
    return watch.seconds(
        lambda i: linear_cross_entropy(
            hidden[i], weight, targets, weights, compiled=watch.platform.compiles
        ),
        num_bytes=num_bytes,
    )


def update_bytes_s(
    watch: Stopwatch, num_params: int, size: tuple[int, int], dtype: torch.dtype
) -> float:
    """Norm of the gradients, clipping, AdamW, and copies in ``dtype`` where products are in that,
    in nominal bytes a second; of matrices of ``size``."""
    sizes = [size] * max(num_params // prod(size), 1)
    params = [nn.Parameter(watch.tensor(*size)) for size in sizes]
    grads = [watch.tensor(*size) for size in sizes]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(params, lr=1e-9, fused=True)
    factor = torch.ones((), device=watch.device)
    is_narrow = dtype != torch.float32
    copies = [torch.empty_like(param, dtype=dtype) for param in params] if is_narrow else []

    @torch.no_grad()
    def update() -> None:
        torch.stack(torch._foreach_norm(grads)).double().square().sum()
        torch._foreach_mul_(grads, factor)
        optimizer.step()
        if copies:
            torch._foreach_copy_(copies, [*params])

    return UPDATE_BYTES * sum(param.numel() for param in params) / watch.seconds(lambda _: update())


def accumulate_bytes_s(watch: Stopwatch, num_params: int, dtype: torch.dtype) -> float:
    """Adding one microbatch's gradients in ``dtype`` to those before it, in nominal bytes a
    second."""
    total, part = watch.ring(num_params), watch.ring(num_params, dtype=dtype)
    seconds = watch.seconds(lambda i: total[i].add_(part[i]))
    return ADDED_BYTES * num_params / seconds


def copy_bytes_s(watch: Stopwatch, num_bytes: int) -> float:
    """Reading and writing a long array."""
    source = watch.tensor(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / watch.seconds(lambda _: target.copy_(source))


def launch_seconds(watch: Stopwatch) -> float:
    """The least that an operation takes."""
    x, weight = watch.tensor(1, 8), watch.tensor(8, 8)

    def some() -> None:
        for _ in range(100):
            F.linear(x, weight)

    return watch.seconds(lambda _: some()) / 100
