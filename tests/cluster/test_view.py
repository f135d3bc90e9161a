"""Pools of like nodes, and how far ranks are apart."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView, alike_as_one
from weft.config.errors import ConfigError

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
MIXED = ClusterView(
    (
        ChipPool(chip=H100, num_nodes=2, chips_per_node=4),
        ChipPool(chip=A100, num_nodes=3, chips_per_node=2, network_gbit_s=100),
    )
)


def test_ranks_count_through_pools() -> None:
    assert MIXED.world_size == 14
    assert [MIXED.node_of(rank) for rank in range(14)] == [0] * 4 + [1] * 4 + [2, 2, 3, 3, 4, 4]
    assert [MIXED.pool_of(rank).chip.name for rank in (7, 8)] == [H100.name, A100.name]
    assert MIXED.share_a_node((4, 7))
    assert not MIXED.share_a_node((3, 4))


def test_rates_are_of_the_pool_or_of_the_chip() -> None:
    assert MIXED.pools[0].network_bytes_s == 50e9
    assert MIXED.pools[1].network_bytes_s == 12.5e9
    assert MIXED.pools[0].link_bytes_s == 450e9


def test_alike_neighbours_are_one_pool() -> None:
    """However many nodes each has, with the names of all; no rank is in another place."""
    near, far = MIXED.pools
    named = replace(near, hosts=("a", "b"))
    more = replace(named, num_nodes=1, hosts=("c",))
    apart = ClusterView((named, more, far, replace(far, num_nodes=1)))
    one, other = alike_as_one(apart).pools
    assert (one.num_nodes, one.hosts, other.num_nodes) == (3, ("a", "b", "c"), 4)
    for rank in range(apart.world_size):
        assert alike_as_one(apart).node_of(rank) == apart.node_of(rank)
    for unlike in (
        replace(near, price_per_hour=2.0),
        replace(near, hosts=("c", "d")),
        replace(near, network_gbit_s=9.0),
        far,
    ):
        assert len(alike_as_one(ClusterView((near, unlike))).pools) == 2
    assert alike_as_one(ClusterView((near, far, near))) == ClusterView((near, far, near))


def test_alike_chips_of_a_machine_are_one_pool() -> None:
    """But not where each pool says what its node has for all: it may be a part."""
    part = ChipPool(chip=H100, num_nodes=1, chips_per_node=3, node="x")
    rest = replace(part, chips_per_node=5)
    (one,) = alike_as_one(ClusterView((part, rest))).pools
    assert (one.chips_per_node, one.node) == (8, "x")
    for unlike in (replace(rest, node="y"), replace(rest, host_gib=64.0)):
        assert len(alike_as_one(ClusterView((part, unlike))).pools) == 2


def lacking_network() -> object:
    chip = replace(H100, network_gbit_s=None)
    return ChipPool(chip=chip, num_nodes=1, chips_per_node=8).network_bytes_s


def lacking_link() -> object:
    return ChipPool(chip=replace(H100, link_gb_s=None), num_nodes=1, chips_per_node=8).link_bytes_s


def lacking_link_in_a_shared_node() -> object:
    pool = ChipPool(chip=replace(H100, link_gb_s=None), num_nodes=1, chips_per_node=1)
    assert pool.link_bytes_s == pool.network_bytes_s, "alone in its node it needs none"
    return replace(pool, node="shared").link_bytes_s


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lacking_link_in_a_shared_node, "chip H100-SXM5-80GB: link_gb_s = null: expected a"),
        (lacking_network, "pool of H100-SXM5-80GB: network_gbit_s = null: expected a positive"),
        (lacking_link, "chip H100-SXM5-80GB: link_gb_s = null: expected a positive number"),
        (lambda: MIXED.pool_of(14), "rank = 14: expected a rank below 14"),
        (lambda: MIXED.node_of(99), "rank = 99: expected a rank below 14"),
        (lambda: replace(MIXED.pools[0], num_nodes=0), "pool of .*: num_nodes = 0: expected at"),
    ],
)
def test_refusals_say_what_is_missing(wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()
