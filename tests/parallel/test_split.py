"""Which part of a parameter a tensor-parallel rank holds, by hand and as a whole."""

from dataclasses import replace

import pytest

from weft.config.errors import ConfigError
from weft.models.registry import FAMILIES
from weft.parallel.params import placement_of
from weft.parallel.tensor.split import check_tp, part_of, shard_box
from weft.plan.box import Box
from weft.plan.layout import Replicate, Shard
from weft.plan.tiling import Tiling

SPEC = replace(
    FAMILIES["llama"].sizes["debug-1m"],
    d_model=48,
    d_ff=10,
    d_head=4,
    num_heads=12,
    num_kv_heads=3,
    vocab_size=11,
)


def rows(by: str, tp: int) -> list[tuple[int, int]]:
    size = {"head": 48, "kv_head": 12}[by]
    boxes = [shard_box(SPEC, (size, 48), Shard(0, by), tp, r) for r in range(tp)]  # type: ignore[arg-type]
    return [(box.offset[0], box.size[0]) for box in boxes]


def test_heads_stay_with_their_key_head() -> None:
    # Three key heads of four queries each: two and one.
    assert rows("kv_head", 2) == [(0, 8), (8, 4)]
    assert rows("head", 2) == [(0, 32), (32, 16)]


def test_fewer_key_heads_than_ranks_are_held_by_several() -> None:
    assert rows("kv_head", 6) == [(0, 4), (0, 4), (4, 4), (4, 4), (8, 4), (8, 4)]
    assert rows("head", 6) == [(8 * r, 8) for r in range(6)]


def test_other_dimensions_are_cut_as_evenly_as_they_go() -> None:
    assert [part_of(10, 3, n) for n in range(3)] == [range(4), range(4, 7), range(7, 10)]
    assert shard_box(SPEC, (11, 48), Shard(0), 2, 1) == Box((6, 0), (5, 48))
    assert shard_box(SPEC, (48,), Replicate(), 2, 1) == Box.whole((48,))


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_held(family: str, tp: int) -> None:
    spec = replace(SPEC, family=family)
    if family == "gpt2":
        spec = replace(spec, num_kv_heads=12, tied=True)
    layout = FAMILIES[family].layout(spec)
    for param in FAMILIES[family].param_specs(spec):
        placement = placement_of(param, layout)
        boxes = {r: shard_box(spec, param.shape, placement, tp, r) for r in range(tp)}
        assert not Tiling(param.shape, boxes).uncovered(), param.name
        cut = isinstance(placement, Shard) and tp > 1
        assert (boxes[0] == Box.whole(param.shape)) != cut, param.name


def test_a_degree_that_cuts_heads_is_refused_with_those_that_do_not() -> None:
    check_tp(SPEC, 6, "tp")
    with pytest.raises(ConfigError) as refused:
        check_tp(SPEC, 4, "pipelines[0].stages[1].mesh.tp")
    assert str(refused.value) == (
        "pipelines[0].stages[1].mesh.tp = 4: expected one of 1, 2, 3, 6. "
        "The model's 12 heads share 3 key heads."
    )
