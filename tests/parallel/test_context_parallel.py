"""Attention divided among ranks is attention of one rank, whichever way keys come to queries."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from weft.axes.cp.axis import ContextParallel
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.data.inside import lengths_of, places_by_work
from weft.elastic.pool import WorkerPool
from weft.nn.attention import Attention
from weft.nn.attention_parts import Keys, Queries, Sight
from weft.nn.causal_attention import BLOCK_QUERIES, causal_attention
from weft.nn.documents import Documents
from weft.nn.full_attention import full_attention
from weft.nn.moved import moved
from weft.parallel.cp.fused_ring import FusedRing
from weft.parallel.cp.gathered import Gathered, Runs
from weft.parallel.cp.modules import own_queries
from weft.parallel.cp.ring import Ring
from weft.parallel.cp.rows import Rows
from weft.parallel.cp.ulysses import Attend, Ulysses, among_groups
from weft.parallel.runtime import AxisGroup, Sum, squared
from weft.plan.layout import Dim

BATCH, D_HEAD = 2, 8
SEEN = {2: (6, 3, 4, 4), 4: (6, 3, 4, 4), 8: (12, 6, 8, 6)}
"""By ranks: heads and key heads; key heads that all ranks see that divide heads, and two of them.
Heads are divided unevenly, and where there are more ranks than key heads two see the same."""
SEQ = 4 * BLOCK_QUERIES + 16
"""Over several blocks in each part for two ranks, in one that is not full for more."""
STARTS = np.random.default_rng(3).random((BATCH, SEQ)) < 1 / 50
LONG = np.broadcast_to(np.arange(SEQ) // 200, (BATCH, SEQ))
SEGMENTS = {"one": None, "short": STARTS.cumsum(1), "long": LONG, "by work": STARTS.cumsum(1)}
"""Of the last, ranks have tokens by the work of documents, which are the short ones."""
WHOLE: dict[bool, Attend] = {True: causal_attention, False: full_attention}
"""By whether it is causal."""
WAYS: dict[str, Callable[[Sum, bool], Attend]] = {
    "ring": lambda total, causal: Ring(total, causal=causal),
    "fused ring": lambda total, causal: FusedRing(total, causal=causal),
    "rows": lambda total, causal: Rows(total, causal=causal),
    "gathered": lambda total, causal: Gathered(total, causal=causal),
    "ulysses": lambda total, causal: Ulysses(total, WHOLE[causal]),
    "2d": lambda total, causal: Ulysses(total, Ring(among_groups(total), causal=causal)),
    "2d fused": lambda total, causal: Ulysses(total, FusedRing(among_groups(total), causal=causal)),
    "2d rows": lambda total, causal: Ulysses(total, Rows(among_groups(total), causal=causal)),
    "2d gathered": lambda total, causal: Ulysses(
        total, Gathered(among_groups(total), causal=causal)
    ),
}
COUNTED = ("one", "short")
"""Documents whose products are counted."""
IN_PLACE = {torch.ops.aten.baddbmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * a[2] * b[2]}
"""Products that PyTorch's counter does not know."""


def inputs(dtype: torch.dtype, ranks: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(7)
    many, kv_heads, *_ = SEEN[ranks]
    heads = (many, kv_heads, kv_heads, many)
    sizes = [(BATCH, SEQ, many, D_HEAD) for many in heads]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def differentiated(
    attend: Any, inputs: list[Tensor], segments: Any, places: Any = None
) -> list[Tensor]:
    """The result and the gradients of queries, keys and values."""
    packed = None if segments is None else Documents.of(segments, "cpu", places).packed
    *given, grad = (x.detach().requires_grad_() for x in inputs)
    result = attend(*given, packed)
    return [result.detach(), *torch.autograd.grad(result, given, grad)]


class Found(NamedTuple):
    """Of one rank."""

    error: float
    """The largest beside one rank in fp64."""
    squares: float
    """Of errors, added up."""
    sent: float = 0
    kept: float = 0
    """Bytes, from forward to backward."""
    flops: float = 0


def divided(
    address: RankAddress, dtype: torch.dtype, causal: bool, names: Sequence[str]
) -> dict[tuple[str, str], Found]:
    """By way, or ``alone``, and documents, which are those of ``names``."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    size = address.world_size
    every = tuple(range(size))
    comm.open_groups(dict.fromkeys([every, *(r for both in squared(every, 2) for r in both)]))
    parts = [ContextParallel().part(Dim(name="seq", size=SEQ), size, n) for n in range(size)]
    slots = torch.tensor([n for part in parts[address.rank] for n in part])
    wide, given_all = inputs(torch.float64, size), inputs(dtype, size)
    found, wholes = {}, dict[str, list[Tensor]]()
    for name in names:
        segments, places = SEGMENTS[name], None
        if name == "by work":
            places = np.stack([places_by_work(lengths_of(x).tolist(), parts) for x in segments])
        own = slots.expand(BATCH, -1) if places is None else torch.from_numpy(places)[:, slots]
        documents = "short" if places is not None else name
        if documents not in wholes:
            wholes[documents] = differentiated(WHOLE[causal], wide, segments)
        alone = whole = wholes[documents]
        if dtype != torch.float64:
            alone = differentiated(WHOLE[causal], given_all, segments)
        found["alone", name] = Found(largest(alone, whole), squares(alone, whole))
        for way in ways_among(size):
            group = AxisGroup(comm, every, near_ways={"ulysses": size}.get(way, 2))
            attend = WAYS[way](Sum(group, parts[address.rank], tuple(parts), None), causal)
            counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
            before = sent(comm)
            kept = list[int]()
            counted = counter if way == "ring" and name in COUNTED else nullcontext()
            with saved_tensors_hooks(partial(noted, kept), lambda x: x), counted:
                given = [moved(x, own) for x in given_all]
                mine = differentiated(attend, given, segments, places)
            exact = [moved(x, own) for x in whole]
            errors = largest(mine, exact), squares(mine, exact)
            more = sent(comm) - before
            found[way, name] = Found(*errors, more, sum(kept), counter.get_total_flops())
    comm.close()
    return found


def many_seen(name: str, ranks: int, near: int, causal: bool) -> int:
    """How many of all tokens go round a ring: without documents all, else those that a rank of
    another group of neighbours sees in some sample, by looking at all pairs of tokens."""
    segments = SEGMENTS[name]
    if segments is None:
        return SEQ
    parts = [ContextParallel().part(Dim(name="seq", size=SEQ), ranks, n) for n in range(ranks)]
    of_slot = np.empty(SEQ, int)
    for rank, places in enumerate(parts):
        of_slot[[slot for part in places for slot in part]] = rank // near
    tokens, seen = np.arange(SEQ), set[tuple[int, int]]()
    for documents in segments:
        group = of_slot
        if name == "by work":
            group = of_slot[places_by_work(lengths_of(documents).tolist(), parts).argsort()]
        pairs = (documents[:, None] == documents) & (group[:, None] != group)
        if causal:
            pairs &= tokens[:, None] < tokens
        for each in range(ranks // near):
            own = pairs.any(1)[group == each]
            seen |= {(each, number) for number in own.nonzero()[0].tolist()}
    return len(seen)


def ways_among(ranks: int) -> list[str]:
    """Two dimensions are two by two ranks."""
    return [way for way in WAYS if ranks > 2 or "2d" not in way]


def sent(comm: Comm) -> float:
    return sum(comm.counters[name].bytes for name in ("keys", "heads") if name in comm.counters)


def noted(kept: list[int], x: Tensor) -> Tensor:
    kept.append(x.nbytes)
    return x


def largest(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


def squares(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", SEEN)
def test_matches_one_rank(ranks: int, causal: bool, pool: WorkerPool) -> None:
    names = [name for name in SEGMENTS if ranks < 8 or name != "long"]  # short ones are, for 8
    found = pool.run(divided, torch.float64, causal, names, world_size=ranks)
    heads, kv_heads, seen, near_seen = SEEN[ranks]
    token = 2 * BATCH * kv_heads * D_HEAD * 8  # its key and value
    there = (ranks - 1) * SEQ * token
    bytes_of = {"gathered": 2 * there, "rows": 3 * there}
    of_head = BATCH * SEQ // ranks * D_HEAD * 8  # on one rank
    bytes_of["ulysses"] = 2 * (ranks - 1) * of_head * 2 * (heads + seen)
    near, groups = 2 * ranks // 2 * of_head * 2 * (heads + near_seen), ranks // 2
    far = 2 * of_head * 2 * 3  # of 6 heads: one for each query head, where two share some
    bytes_of["2d gathered"] = near + 2 * (groups - 1) * ranks * far
    bytes_of["2d rows"] = bytes_of["2d gathered"] + (groups - 1) * ranks * far
    mine = BATCH * SEQ // ranks * 8
    own = mine * (2 * (heads + kv_heads) * D_HEAD + heads)
    rows = mine * ((heads + 2 * kv_heads) * D_HEAD + heads * SEQ)
    for way, name in found[0]:
        if way == "alone":
            continue
        of_ranks = [each[way, name] for each in found]
        assert max(each.error for each in of_ranks) < 1e-12, (way, name)
        goes = 3 * (ranks - 1) * token
        bytes_of["ring"] = bytes_of["fused ring"] = goes * many_seen(name, ranks, 1, causal)
        goes = 3 * (groups - 1) * far * ranks // SEQ
        bytes_of["2d"] = bytes_of["2d fused"] = near + goes * many_seen(name, ranks, 2, causal)
        assert sum(each.sent for each in of_ranks) == bytes_of[way]
        firsts = 4 * BATCH * SEQ * (name != "one")
        if name != "by work":
            assert way != "ring" or {each.kept for each in of_ranks} == {own + firsts}
            assert way != "fused ring" or {each.kept for each in of_ranks} == {own}
            assert way != "rows" or {each.kept for each in of_ranks} == {rows}
    flops = [each["ring", "one"].flops for each in found]
    every = 7 * 2 * BATCH * heads * SEQ**2 * D_HEAD  # products of all queries with all keys
    rounded = 0.1 * max(1, ranks / 4)  # blocks of queries are longer than parts
    assert max(flops) < (1 + rounded) * min(flops)
    assert sum(flops) < (0.55 + rounded) * every if causal else sum(flops) == every
    assert sum(each["ring", "short"].flops for each in found) < 0.6 * sum(flops)


def test_tokens_in_runs_and_the_keys_that_they_see() -> None:
    """Two samples of documents of 12 and 4 tokens: the runs of the first rank are 0 to 2, 9 to 11
    and the last two, which see 3, 12 and 4 keys; where they look both ways 12 and 4."""
    parts = ((range(4), range(12, 16)), (range(4, 12),))
    of_ranks = ([0, 1, 2, 9, 10, 11, 14, 15], [3, 4, 5, 6, 7, 8, 12, 13])
    places = np.empty((2, 16), np.int64)
    for places_of, tokens in zip(parts, of_ranks, strict=True):
        places[:, [slot for part in places_of for slot in part]] = tokens
    packed = Documents.of(np.repeat([[0] * 12 + [1] * 4], 2, axis=0), "cpu", places).packed
    assert packed.host is not None
    runs = Runs.of(packed.host, parts[0], causal=True)
    assert runs.borders.tolist() == [0, 3, 6, 8, 11, 14, 16]
    assert runs.key_borders.tolist() == [0, 3, 15, 19, 22, 34, 38]
    both_ways = Runs.of(packed.host, parts[0], causal=False)
    assert both_ways.borders.tolist() == [0, 6, 8, 14, 16]


def test_sums_are_wide_in_bf16(pool: WorkerPool) -> None:
    """No farther from exact than one rank, or than its kernel: what comes is added up in fp32."""
    found = pool.run(divided, torch.bfloat16, True, ["one"], world_size=2)
    for way in ("ring", "fused ring"):
        mine = sum(each[way, "one"].squares for each in found)
        assert mine <= found[0]["alone", "one"].squares, way


def test_documents_that_are_between_are_not_computed() -> None:
    """A rank has two pieces of documents, and another rank all that lies between."""
    tokens = torch.tensor([[*range(32), *range(900, 932)]])
    packed = Documents.of(np.repeat([0, 1, 2], [32, 868, 100])[None], "cpu").packed
    sight = Sight.moved(packed, tokens, causal=True).among(torch.arange(1000)[None])
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    queries, keys = Queries(torch.ones(1, 1, 64, 8), 8), torch.ones(1, 1000, 8)
    with counter:
        queries.see(Keys(range(1000), keys, keys), sight)
    assert counter.get_total_flops() == 2 * 2 * (32 * 32 + 32 * 32) * 8


class Noting(Comm):
    """One rank of a ring, which notes when it is asked to send and when what came is read."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def exchange(self, parts: Any, sizes: Any, **_: Any) -> Any:
        (to,) = (n for n, part in enumerate(parts) if part.numel())
        (source,) = (n for n, size in enumerate(sizes) if size[1])
        self._notes.append(f"send to {to}")
        room = torch.full(sizes[source], float(source))
        return lambda: self._notes.append("read") or [room] * len(sizes)


def test_the_last_gradients_come_home_beside_the_rest_of_the_own_ones() -> None:
    """Three ranks: keys go on twice, gradients of others' keys twice, and one's own stay."""
    notes: list[str] = []
    parts = [ContextParallel().part(Dim(name="seq", size=12), 3, n) for n in range(3)]
    ring = Ring(Sum(AxisGroup(Noting(notes), (0, 1, 2)), parts[0], tuple(parts), None), causal=True)

    def gradient(number: int, held: Tensor) -> Tensor:
        notes.append(f"gradient of {number}")
        return torch.full_like(held, 10.0)

    found = ring.returned(torch.zeros(1, 4, 1), ring.all, gradient, lambda own: own.add_(100))
    assert notes == [
        "send to 1", "gradient of 0", "read",
        "send to 1", "gradient of 2", "send to 1", "read",
        "gradient of 1", "read", "send to 1", "read",
    ]  # fmt: skip
    assert found.flatten().tolist() == [112.0] * 4  # rank 2 sends what is full of twos


def test_the_next_keys_are_on_their_way_before_these_are_used() -> None:
    notes: list[str] = []
    parts = [ContextParallel().part(Dim(name="seq", size=12), 3, n) for n in range(3)]
    ring = Ring(Sum(AxisGroup(Noting(notes), (0, 1, 2)), parts[0], tuple(parts), None), causal=True)
    for number, _ in ring.round(torch.zeros(1, 4, 1), ring.all):
        notes.append(f"use those of {number}")
    assert notes == [
        "send to 1",
        "use those of 0",
        "read",
        "send to 1",
        "use those of 2",
        "read",
        "use those of 1",
    ]


def test_nobody_sends_where_no_rank_sees_the_keys_of_another() -> None:
    """Documents as long as the parts."""
    notes: list[str] = []
    parts = [ContextParallel().part(Dim(name="seq", size=12), 3, n) for n in range(3)]
    ring = Ring(Sum(AxisGroup(Noting(notes), (0, 1, 2)), parts[0], tuple(parts), None), causal=True)
    packed = Documents.of(np.arange(12)[None] // 2, "cpu").packed
    given = [torch.randn(1, 4, 2, 4) for _ in range(3)]
    found = ring(*given, packed)
    near = Documents.of(np.arange(4)[None] // 2, "cpu").packed
    assert torch.allclose(found, causal_attention(*given, near), atol=1e-6)
    assert not notes


class Windowed(Attention):
    """Tokens see the last few alone."""

    def __init__(self) -> None:
        super().__init__(8, 4, num_heads=2, num_kv_heads=2)
        self.core.call = self.windowed

    def windowed(self, q: Tensor, k: Tensor, v: Tensor, packed: Any) -> Tensor:
        return causal_attention(q[:, -4:], k[:, -4:], v[:, -4:], packed)


def test_a_core_of_its_own_is_refused() -> None:
    """It would be computed as if it saw all earlier tokens."""
    group = AxisGroup(Noting([]), (0, 1))
    with pytest.raises(ConfigError, match="core = 'that of Windowed': expected causal_attention"):
        own_queries(Windowed(), Sum(group, (range(4),), ((range(4),),) * 2, None))
