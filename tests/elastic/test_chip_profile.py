"""Measuring a chip: a few shapes for real, in processes, and what is made of them."""

import json
from dataclasses import replace

from weft.cluster.detect import detect_node
from weft.cost.profile_file import from_data, to_json
from weft.elastic import chip_profile
from weft.elastic.chip_profile import KINDS, SHORT, measure_links, profile_chip, real_steps


def test_a_quick_profile_of_this_machine() -> None:
    """Every number is there and can be read back; two ranks are measured where there are two."""
    said: list[str] = []
    node = replace(detect_node(), cores=1, cpu_bf16=False)
    profile = profile_chip(node, device="cpu", quick=True, say=said.append)
    assert said
    assert {point.dtype for point in profile.products} == {"fp32"}
    assert {point.name for point in profile.moving} >= {"activation", "loss", "embedding"}
    assert from_data(json.loads(to_json(profile))) == profile
    assert 1e9 < profile.peak_flops("fp32") < 1e13
    assert 0.5 < profile.gap < 3
    assert 50e6 < profile.runtime_bytes < 2e9


def test_links_are_measured_between_two_ranks(pool) -> None:
    links = pool.run(measure_links, "cpu", True, world_size=2)[0]
    assert {link.kind for link in links} == set(KINDS)
    assert all(link.seconds > 0 for link in links)
    assert len(links) == len(KINDS) * len(chip_profile.LINK_BYTES)


def test_real_steps_take_time(pool) -> None:
    assert 0 < pool.run(real_steps, "cpu", SHORT, 1, world_size=1)[0] < 60
