"""Counts against closed formulas, and messages that name the collective."""

from typing import Any

import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.parts import flat_of
from weft.elastic.pool import WorkerPool


def collectives(address: RankAddress) -> dict[str, Any]:
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([(0, 2), (1, 2)])
    comm.all_reduce(torch.ones(6), name="world")
    pair = torch.full((5,), float(address.rank), dtype=torch.float64)
    for group in ((0, 2), (1, 2)):
        if address.rank in group:
            comm.all_reduce(pair, name="pair", group=group)
    received = torch.tensor([float(address.rank)])
    comm.broadcast(received, src=1, name="copy")
    largest = torch.tensor([float(address.rank)])
    comm.all_reduce(largest, name="largest", largest=True)
    everyone = comm.gather_json({"rank": address.rank, "text": "é" * address.rank}, name="facts")
    comm.close()
    counts = {n: (comm.counters[n].calls, comm.counters[n].bytes) for n in comm.counters}
    return {
        "pair": pair[0].item(),
        "received": received.item(),
        "largest": largest.item(),
        "everyone": everyone,
        "counts": counts,
        "peers": sorted(comm.counters["pair"].peers),
    }


def test_three_ranks(pool: WorkerPool) -> None:
    ranks = pool.run(collectives, world_size=3)
    assert [r["received"] for r in ranks] == [1, 1, 1]
    assert [r["largest"] for r in ranks] == [2, 2, 2]
    # rank 2 adds rank 0's value first, rank 1's to the sum after it
    assert [r["pair"] for r in ranks] == [2, 3, 3]
    facts = [{"rank": r, "text": "é" * r} for r in range(3)]
    assert all(r["everyone"] == facts for r in ranks)
    # A ring all-reduce of n bytes over p ranks sends 2 (p - 1) / p n from each.
    assert ranks[0]["counts"]["world"] == (1, 2 * 2 / 3 * 24)
    assert ranks[0]["counts"]["pair"] == (1, 2 * 1 / 2 * 40)
    assert ranks[2]["counts"]["pair"] == (2, 2 * 40)
    assert ranks[2]["peers"] == [0, 1]
    assert [r["counts"]["copy"] for r in ranks] == [(1, 0.0), (1, 4.0), (1, 0.0)]


def test_a_job_of_one_process_sends_nothing() -> None:
    comm = Comm()
    tensor = torch.ones(3)
    comm.all_reduce(tensor, name="gradients")()
    comm.broadcast(tensor, src=0, name="values")
    assert comm.gather_json([1], name="facts") == [[1]]
    assert list(comm.counters) == []
    assert tensor.tolist() == [1, 1, 1]


def exchanged(address: RankAddress, group: tuple[int, ...]) -> list[list[float]]:
    """Rank r gives the group's i-th rank ``i + 1`` elements of value ``10 r + i``."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([group])
    own = group.index(address.rank)
    parts = [torch.full((i + 1,), 10.0 * address.rank + i) for i in range(len(group))]
    sizes = [(own + 1,)] * len(group)
    received = comm.exchange(parts, sizes, name="exchange", group=group)()
    comm.close()
    return [part.tolist() for part in received]


def test_an_exchange_follows_the_order_in_which_a_group_names_its_ranks(pool: WorkerPool) -> None:
    ranks = pool.run(exchanged, (2, 0, 1), world_size=3)
    assert ranks[2] == [[20.0], [0.0], [10.0]]
    assert ranks[0] == [[21.0] * 2, [1.0] * 2, [11.0] * 2]
    assert ranks[1] == [[22.0] * 3, [2.0] * 3, [12.0] * 3]


def segments(
    address: RankAddress, sizes: tuple[int, ...]
) -> tuple[list[float], list[float], tuple[int, float], tuple[int, float]]:
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    flat = torch.arange(6.0) * (address.rank + 1)
    own = torch.empty((sizes or (2, 2, 2))[address.rank])
    finish = comm.reduce_scatter(flat, own, name="scatter", group=comm.world, sizes=sizes)
    finish()
    comm.open_gathering([comm.world])
    whole = torch.full((6,), -1.0)
    torch.split(whole, list(sizes or (2, 2, 2)))[address.rank].copy_(own)
    comm.all_gather(whole, name="gather", group=comm.world, sizes=sizes)()
    comm.close()
    scatter, gather = comm.counters["scatter"], comm.counters["gather"]
    return (
        own.tolist(),
        whole.tolist(),
        (scatter.calls, scatter.bytes),
        (gather.calls, gather.bytes),
    )


def test_one_message_alone_is_sent_from_where_it_lies() -> None:
    nothing, message = torch.empty(0), torch.arange(6.0).view(2, 3)
    sent = flat_of([nothing, message, nothing], [2, 1, 0])
    assert sent.data_ptr() == message.data_ptr()
    assert sent.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_of([message, message[:1]], [1, 0]).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert flat_of([nothing, nothing], [0, 1]).shape == (0,)


def test_segments_are_summed_and_gathered(pool: WorkerPool) -> None:
    ranks = pool.run(segments, (), world_size=3)
    total = [i * (1 + 2 + 3) for i in range(6)]
    for rank, (own, whole, scatter, gather) in enumerate(ranks):
        assert own == total[2 * rank : 2 * rank + 2]
        assert whole == total
        assert scatter == gather == (1, 2 / 3 * 24)
    unlike = pool.run(segments, (0, 5, 1), world_size=3)
    assert [own for own, *_ in unlike] == [[], total[:5], total[5:]]
    assert [whole for _, whole, *_ in unlike] == [total] * 3
    for place in (2, 3):
        sent = [rank[place][1] for rank in unlike]
        assert sum(sent) == 2 * 24, "no more in all than equal segments"
    assert [rank[3] for rank in unlike] == [(1, 0), (1, 2 * 20), (1, 2 * 4)]
