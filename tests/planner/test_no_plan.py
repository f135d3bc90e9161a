"""Where nothing fits, the error says by how much, where, and what would do."""

import re
from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, search

A100 = catalogue()["A100-SXM4-80GB"]
CLUSTER = ClusterView((ChipPool(chip=A100, num_nodes=1, chips_per_node=8),))
LARGE = Workload(spec=SIZES["llama3-70b"], seq_len=8192, samples=64)


def message(workload: Workload, **options: object) -> str:
    with pytest.raises(NoPlan) as caught:
        search(Problem(workload, CLUSTER, options=Options(**options)))
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


def test_what_is_short_and_what_would_do() -> None:
    assert message(LARGE) == (
        "cluster = ['A100-SXM4-80GB']: expected chips with enough memory for the model. "
        "The plan that needs least puts 151.8 GiB on stage 0 (A100-SXM4-80GB), 78.2 GiB more than "
        "the 73.6 GiB that may be planned. It would fit with more nodes (3 x A100-SXM4-80GB), or "
        "with 2.07 times the memory on each chip."
    )


def test_state_goes_where_there_is_room_when_nothing_else_fits() -> None:
    """Weights, gradients and what is kept of layers: the rest is 90 GiB of the node's memory."""
    one = replace(CLUSTER.pools[0], chips_per_node=1)
    workload = replace(LARGE, spec=SIZES["llama3-8b"], seq_len=4096, samples=16)
    options = Options(tiers=("device", "host"))

    def tiers(host_gib: float | None) -> set[str]:
        cluster = ClusterView((replace(one, host_gib=host_gib),))
        plan = search(Problem(workload, cluster, options=options)).best.plan
        return {stage.state_tier for _, _, stage in plan.stages()}

    assert tiers(128) == {"host"}
    for too_little in (None, 64):
        with pytest.raises(NoPlan, match=r"fit with room for optimizer state in the m") as caught:
            tiers(too_little)
        enough = int(re.search(r"of its nodes \(host_gib: (\d+)\)", str(caught.value))[1])
        assert tiers(enough) == {"host"}
        with pytest.raises(NoPlan):
            tiers(0.98 * enough)


def test_more_room_on_hosts_makes_no_plan_slower() -> None:
    """Parameters in there too are not where the search ends: activations may be faster there."""
    cards = ChipPool(chip=catalogue()["A10"], num_nodes=1, chips_per_node=1)
    work = replace(LARGE, spec=SIZES["llama3.2-3b"], seq_len=2048, samples=4)
    every = ("device", "host")
    options = Options(tiers=every, param_tiers=every, mixed_recompute=True)
    few, many = (
        search(Problem(work, ClusterView((replace(cards, host_gib=gib),)), options=options))
        for gib in (56, 80)
    )
    assert many.best.time.step_s <= few.best.time.step_s
    assert {stage.param_tier for _, _, stage in few.best.plan.stages()} == {"device"}


def test_the_changes_that_are_named_do() -> None:
    text = message(LARGE)
    nodes = int(re.search(r"\((\d+) x A100", text)[1])
    more = replace(CLUSTER.pools[0], num_nodes=nodes)
    assert search(Problem(LARGE, ClusterView((more,)))).best.time.step_s > 0
    times = float(re.search(r"([\d.]+) times", text)[1])
    for factor, fits in ((times * 1.01, True), (times * 0.98, False)):
        chip = replace(A100, memory_gib=A100.memory_gib * factor)
        cluster = ClusterView((replace(CLUSTER.pools[0], chip=chip),))
        if fits:
            assert search(Problem(LARGE, cluster)).best.memory
        else:
            with pytest.raises(NoPlan):
                search(Problem(LARGE, cluster))


def test_a_choice_that_was_taken_away_is_named() -> None:
    medium = replace(LARGE, spec=SIZES["llama3-8b"])
    assert "It would fit with ZeRO 3, or with " in message(
        medium, zero=(0,), max_stages=1, max_split=1
    )
    text = message(replace(LARGE, spec=SIZES["llama3-8b"], seq_len=131_072), recompute=("off",))
    assert "It would fit with recomputation, or with " in text


def test_no_samples_for_the_ranks() -> None:
    """Of experts with room by whole samples; with others ranks get a part of the one each."""
    spec = SIZES["mixtral-8x7b"]
    whole = replace(LARGE, samples=1, spec=replace(spec, experts=replace(spec.experts, capacity=2)))
    text = message(whole, leave_idle=False, max_split=1, max_stages=2)
    assert text == (
        "cluster = ['A100-SXM4-80GB']: expected chips that the model can be laid over, however "
        "much memory they had. No meshes fill chips (there are 8) with the samples of a step "
        "(1): more samples, or fewer chips, would do."
    )


def test_what_is_short_by_thousands_of_times_is_memory_too() -> None:
    """Nothing is said of samples, of which more would not do."""
    small = replace(A100, name="Small", memory_gib=4)
    cluster = ClusterView((ChipPool(chip=small, num_nodes=1, chips_per_node=1),))
    workload = replace(LARGE, spec=SIZES["llama3-405b"], samples=8)
    with pytest.raises(NoPlan, match=r"expected chips with enough memory.*It would fit") as caught:
        search(Problem(workload, cluster, options=Options()))
    times = float(re.search(r"([\d.]+) times the memory on each chip", str(caught.value))[1])
    assert times > 1024 and "samples" not in str(caught.value)
