"""Which ranks links say are near: from matrices of a known cluster, and measured for real."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cluster.cluster import Node
from weft.cluster.topology import (
    Links,
    between_machines,
    file_of,
    in_order,
    levels,
    lopsided,
    nodes_of,
    save_links,
    saved_links,
    topology_folder,
)
from weft.comm.address import RankAddress
from weft.config.errors import PassedOver
from weft.elastic.pool import WorkerPool
from weft.elastic.topology import links_of_job
from weft.resolve.rank_chips import Machine, chips_of_machines

Speed = tuple[float, float]
"""Seconds late and bytes a second."""
CHIP, NODE, RACK = (5e-6, 200e9), (15e-6, 20e9), (60e-6, 2e9)


def simulated(places: list[tuple[int, ...]], speeds: tuple[Speed, ...], noise: float) -> Links:
    """Ranks at places of a tree: how many of the first numbers two have alike says how far they are
    apart. Every link is off by up to a part ``noise``, each way its own."""
    draw = random.Random(1)

    def between(one: int, other: int, what: int) -> float:
        a, b = places[one], places[other]
        if one == other:
            return 0.0
        alike = next((n for n, both in enumerate(zip(a, b, strict=True)) if len({*both}) > 1))
        return speeds[len(a) - 1 - alike][what] * (1 + noise * (2 * draw.random() - 1))

    every = range(len(places))
    late, fast = (tuple(tuple(between(a, b, n) for b in every) for a in every) for n in (0, 1))
    hosts = tuple(f"h{'.'.join(map(str, place[:-1]))}" for place in places)
    return Links(hosts=hosts, latency_s=late, bytes_s=fast, date="2026-11-24T12:00:00Z")


def test_groups_are_those_of_the_cluster() -> None:
    """Two racks of two nodes of three ranks, whose numbers are not given out in order."""
    places = [(rack, node, n) for n in range(3) for rack in range(2) for node in range(2)]
    links = simulated(places, (CHIP, NODE, RACK), noise=0.1)
    found = levels(links)
    nodes = ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))
    racks = ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))
    assert [level.groups for level in found] == [nodes, racks, (tuple(range(12)),)]
    assert [level.num_links for level in found] == [4 * 3, 2 * 9, 36]
    for level, (late, fast) in zip(found, (CHIP, NODE, RACK), strict=True):
        assert level.latency_s == pytest.approx(late, rel=0.1)
        assert level.bytes_s == pytest.approx(fast, rel=0.1)
        assert level.slowest_bytes_s <= level.bytes_s
    assert nodes_of(found, links) == nodes
    late, slowest = between_machines(links) or (0, 0)
    assert slowest == pytest.approx(RACK[1], rel=0.1)
    assert not [*lopsided(links)]


def test_what_is_no_group_is_noise() -> None:
    """One link of a flat network far better, and one far worse, than its neighbours' say nothing;
    links alike between machines leave machines as they are called."""
    links = simulated([(n % 2, n) for n in range(6)], (NODE, NODE), noise=0.05)
    rates = [list(row) for row in links.bytes_s]
    for one, other, times in ((0, 1, 3.0), (1, 2, 3.0), (4, 5, 0.2)):
        rates[one][other] *= times
        rates[other][one] *= times
    odd = replace(links, bytes_s=tuple(map(tuple, rates)))
    assert len(levels(odd)) == 1 and levels(odd)[0].groups == (tuple(range(6)),)
    assert nodes_of(levels(odd), odd) == ((0, 2, 4), (1, 3, 5))
    assert len(levels(links, tolerance=0.02)[-1].groups) == 1, "however finely one looks"


def test_a_way_that_is_slower_is_named() -> None:
    links = simulated([(0, 0), (0, 1), (1, 0)], (CHIP, RACK), noise=0.01)
    rates = [list(row) for row in links.bytes_s]
    rates[2][1] /= 4
    (found,) = lopsided(replace(links, bytes_s=tuple(map(tuple, rates))))
    assert found[:2] == (2, 1) and found[2] > 2
    assert levels(replace(links, bytes_s=tuple(map(tuple, rates))))[0].groups == ((0, 1), (2,))


def test_what_was_measured_is_kept_for_the_same_machines(tmp_path: Path) -> None:
    links = simulated([(0, 0), (0, 1), (1, 0), (1, 1)], (CHIP, RACK), noise=0.3)
    save_links(links, file_of(tmp_path, links.hosts))
    assert saved_links(tmp_path, ["h1", "h0", "h0"]) == links
    assert saved_links(tmp_path, ["h1", "h0", "h2"]) is None
    turned = in_order(links, ["h1", "h0", "h0", "h1"])
    assert turned is not None
    assert turned.bytes_s[0][1] == links.bytes_s[2][0]
    assert turned.latency_s[2][3] == links.latency_s[1][3]
    assert in_order(links, ["h0", "h1"]) is None
    file_of(tmp_path, links.hosts).write_text("[]")
    with pytest.warns(PassedOver, match="holds no measured links; `weft chips topology`"):
        assert saved_links(tmp_path, links.hosts) is None
    save_links(replace(links, latency_s=((0.0,),)), file_of(tmp_path, links.hosts))
    with pytest.warns(PassedOver, match="holds no measured links"):
        assert saved_links(tmp_path, links.hosts) is None


def test_plans_of_several_machines_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path))
    machines = [
        Machine(
            node=Node(host=name, cpu="any", cores=1, memory_gib=4.0, cpu_bf16=False),
            devices=("cpu",),
            profile=None,
            threads=1,
        )
        for name in ("h0", "h1")
    ]
    assert chips_of_machines(machines).basis[-1] == "a guess of 10 Gbit/s between machines"
    links = simulated([(0, 0), (1, 0)], (RACK, RACK), noise=0)
    save_links(links, file_of(topology_folder(tmp_path), links.hosts))
    expected = "16 Gbit/s between machines, measured 2026-11-24T12:00:00Z"
    assert chips_of_machines(machines).basis[-1] == expected


def measured_twice(address: RankAddress, folder: Path) -> tuple[Links, Links]:
    first = links_of_job(address, "cpu", folder, fresh=False)
    return first, links_of_job(address, "cpu", folder, fresh=False)


def test_links_of_this_machine(pool: WorkerPool, tmp_path: Path) -> None:
    """Three processes, for real: plausible figures of every link, one node, and kept."""
    first, again = pool.run(measured_twice, tmp_path, world_size=3)[0]
    assert first == again and len({*first.hosts}) == 1
    for src in range(3):
        for dst in {0, 1, 2} - {src}:
            assert 1e-7 < first.latency_s[src][dst] < 1
            assert 1e6 < first.bytes_s[src][dst] < 1e12
    assert nodes_of(levels(first, tolerance=10), first) == ((0, 1, 2),)
