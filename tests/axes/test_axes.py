"""What each axis divides, and into what, by hand; and what the axes of a table have in common."""

from dataclasses import replace

import pytest

from weft.axes.check import change_along
from weft.axes.cp.axis import ContextParallel
from weft.axes.dp.axis import DataParallel
from weft.axes.held import check_mesh, placement, tiling
from weft.axes.registry import AXES
from weft.axes.tp.axis import TensorParallel
from weft.config.axes import ENTRIES, NAMES, SAMPLE_AXES
from weft.config.errors import ConfigError
from weft.models.decoder_family import DecoderDims
from weft.models.registry import FAMILIES, dims_of_param, dims_of_stage
from weft.plan.box import Box
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Partial, Replicate, Shard, dims_of
from weft.plan.mesh import Mesh

SPEC = replace(
    FAMILIES["llama"].sizes["debug-1m"],
    d_model=48,
    d_ff=10,
    d_head=4,
    num_heads=12,
    num_kv_heads=3,
    vocab_size=11,
)
DIMS = DecoderDims.of(SPEC)
TP, DP, CP = TensorParallel(), DataParallel(), ContextParallel()


def rows(dim: Dim, tp: int) -> list[tuple[int, int]]:
    """First row and number of rows of each rank's part of a matrix."""
    boxes = tiling((dim, DIMS.d_model), "param", Mesh.of(range(tp), tp=tp)).boxes.values()
    return [(box.offset[0], box.size[0]) for (box,) in boxes]


def test_heads_stay_with_their_key_head() -> None:
    # Three key heads of four queries each: two and one.
    assert rows(DIMS.kv_heads, 2) == [(0, 8), (8, 4)]
    assert rows(DIMS.heads, 2) == [(0, 32), (32, 16)]


def test_fewer_key_heads_than_ranks_are_held_by_several() -> None:
    assert rows(DIMS.kv_heads, 6) == [(0, 4), (0, 4), (4, 4), (4, 4), (8, 4), (8, 4)]
    assert rows(DIMS.heads, 6) == [(8 * r, 8) for r in range(6)]


def test_other_dimensions_are_cut_as_evenly_as_they_go() -> None:
    boxes = tiling((DIMS.vocab, DIMS.d_model), "param", Mesh.of((0, 1), tp=2)).boxes
    assert boxes[1] == (Box((6, 0), (5, 48)),)
    vector = tiling((DIMS.d_model,), "param", Mesh.of((0, 1), tp=2)).boxes
    assert vector[1] == (Box.whole((48,)),)


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_held(family: str, tp: int) -> None:
    spec = replace(SPEC, family=family)
    if family == "gpt2":
        spec = replace(spec, num_kv_heads=12, tied=True)
    layout = FAMILIES[family].layout(spec)
    for param in FAMILIES[family].param_specs(spec):
        dims = dims_of_param(param, layout)
        tiled = tiling(dims, "param", Mesh.of(range(tp), tp=tp))
        assert not tiled.uncovered(), param.name
        cut = isinstance(placement(dims, "param", TP), Shard) and tp > 1
        assert (tiled.boxes[0] == (Box.whole(param.shape),)) != cut, param.name


def test_a_degree_that_cuts_heads_is_refused_with_those_that_do_not() -> None:
    dims = dims_of(FAMILIES["llama"].layout(SPEC).values())
    TP.check(dims, 6, "tp")
    with pytest.raises(ConfigError) as refused:
        check_mesh(dims, Mesh.of(range(4), tp=4), "pipelines[0].stages[1].mesh")
    assert str(refused.value) == (
        "pipelines[0].stages[1].mesh.tp = 4: expected one of 1, 2, 3, 6. "
        "The model's 12 heads share 3 key heads."
    )


def test_a_part_of_the_head_that_is_too_small_is_what_is_wrong() -> None:
    with pytest.raises(ConfigError) as refused:
        check_mesh(dims_of_stage(SPEC, (0, 1)), Mesh.of(range(2), tp=2), "mesh")
    assert str(refused.value) == (
        "mesh.tp = 2: expected one of 1. The model's head has 1 of its rows here."
    )


def test_every_published_size_has_the_degrees_that_its_heads_allow() -> None:
    """Against the rule for decoders, written out: whole key heads, or equal queries of one."""
    for family in FAMILIES.values():
        for spec in family.sizes.values():
            if not spec.num_heads:
                continue
            dims = dims_of(family.layout(replace(spec, num_layers=1)).values())
            keys, per_key = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
            for tp in range(1, 2 * spec.num_heads):
                shared = tp % keys == 0 and per_key % max(1, tp // keys) == 0
                fits = tp <= min(spec.num_heads, spec.seq_len, spec.vocab_size, spec.d_ff)
                assert TP.allows(dims, tp) == (fits and (tp <= keys or shared)), (spec, tp)


def test_axes_are_checked_on_what_those_before_them_leave() -> None:
    """Twelve queries of three key heads in three parts: four queries of one key, not for three."""
    outer = TensorParallel()
    axes = {"dp": outer, "tp": TP}
    dims = [DIMS.heads, DIMS.kv_heads]
    check_mesh(dims, Mesh.of(range(12), dp=3, tp=4), "mesh", axes)
    with pytest.raises(ConfigError) as refused:
        check_mesh(dims, Mesh.of(range(9), dp=3, tp=3), "mesh", axes)
    assert str(refused.value).startswith("mesh.tp = 3: expected one of 1, 2, 4. ")
    six = Dim(name="heads", size=36, groups=2, units=6, width=True)  # a quarter is three queries
    with pytest.raises(ConfigError, match=r"mesh\.tp = 2: expected one of 1, 3\."):
        check_mesh([six], Mesh.of(range(8), dp=4, tp=2), "mesh", axes)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_samples_lie_as_plans_divide_them(size: int) -> None:
    for mesh in (Mesh.of(range(12), tp=2, dp=6), Mesh.of(range(7), dp=7), Mesh.of((3,))):
        lying = tiling([replace(SAMPLES, size=size)], "stream", mesh).boxes
        for rank, part in mesh.split_samples(size).items():
            assert [range(b.offset[0], b.end[0]) for b in lying[rank]] == [part]
        first = [rank for rank in mesh.ranks if mesh.is_first_with_samples(rank)]
        assert len(first) == mesh.sample_ways == mesh.size("dp")
        parts = mesh.split_samples(size)
        assert sum(len(parts[rank]) for rank in first) == size


def test_ranks_without_samples_are_refused() -> None:
    samples = [replace(SAMPLES, size=3)]
    DP.check(samples, 3, "dp")
    assert DP.allows(samples, 3) and not DP.allows(samples, 4)
    with pytest.raises(ConfigError) as refused:
        DP.check(samples, 4, "plan.stages[0].dp")
    assert str(refused.value) == (
        "plan.stages[0].dp = 4: expected at most the samples of a micro-batch (3). "
        "Further ranks would have nothing to do."
    )
    DP.check([SAMPLES], 4, "dp")  # their number is not known


def test_activations_lie_as_their_form_says() -> None:
    hidden: dict[Form, object] = {"stream": Shard(1), "inner": Replicate()}
    for form, expected in hidden.items():
        assert placement(DIMS.hidden, form, TP) == expected
        assert placement(DIMS.hidden, form, DP) == Shard(0)
    leaves = Edge(DIMS.hidden, "inner", "stream")
    assert change_along(TP, leaves, term=True) == (Partial(), Shard(1))
    assert change_along(TP, leaves) == (Replicate(), Shard(1))
    assert change_along(DP, leaves) is None
    assert placement((SAMPLES, DIMS.seq, DIMS.d_ff), "inner", TP) == Shard(2)


def test_a_rank_of_cp_has_a_part_from_either_end() -> None:
    tokens = Dim(name="seq", size=24)
    parts = [CP.part(tokens, 3, place) for place in range(3)]
    assert parts == [
        (range(4), range(20, 24)),
        (range(4, 8), range(16, 20)),
        (range(8, 16),),
    ]
    ahead = [sum(sum(part) for part in held) for held in parts]  # keys that queries see
    assert len({*ahead}) == 1
    CP.check([tokens], 3, "cp")
    with pytest.raises(ConfigError) as refused:
        check_mesh([tokens], Mesh.of(range(5), cp=5), "plan.stages[0]")
    assert str(refused.value) == (
        "plan.stages[0].cp = 5: expected one of 1, 2, 3, 4, 6. Each rank has two parts of a sample "
        "of 24 tokens, and all parts are equal."
    )


def test_the_table_for_people_and_the_axes_agree() -> None:
    assert tuple(AXES) == NAMES == tuple(axis.name for axis in AXES.values())
    dividing = [name for name, axis in AXES.items() if axis.divides(SAMPLES, "stream")]
    assert tuple(dividing) == SAMPLE_AXES
    assert all(entry.manual for entry in ENTRIES)


def test_tp_is_refused_where_no_parameter_has_what_it_divides() -> None:
    """Every rank would compute everything, and gradients would be added up over all of them."""
    dims = {Dim(name="classes", size=8), Dim(name="seq", size=8)}
    assert TensorParallel().allows(dims, 1) and not TensorParallel().allows(dims, 2)
    with pytest.raises(ConfigError, match="No parameter of the model has a dimension that tp"):
        check_mesh(dims, Mesh.of(range(2), tp=2), "mesh")
