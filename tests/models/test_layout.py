"""Layouts name every parameter, cut where heads and channels end, and fit every published size."""

from dataclasses import replace

import pytest

from weft.models.registry import FAMILIES
from weft.plan.layout import Layout, Replicate, Shard
from weft.plan.model import ModelSpec, ParamSpec

ROWS = [(family, size) for family in FAMILIES for size in FAMILIES[family].sizes]


def _two_layers(row: tuple[str, str]) -> ModelSpec:
    return replace(FAMILIES[row[0]].sizes[row[1]], num_layers=2)


def _placement(layouts: dict[str, Layout], param: ParamSpec) -> Shard | Replicate:
    module, _, own = param.name.rpartition(".")
    placement = layouts[module].params[own]
    assert isinstance(placement, Shard | Replicate)
    return placement


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_layout_names_each_parameter_and_no_other(row: tuple[str, str]) -> None:
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    named = {
        f"{module}.{own}" for module, entry in family.layout(spec).items() for own in entry.params
    }
    assert named == {param.name for param in family.param_specs(spec)}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_only_small_vectors_and_the_positions_are_whole(row: tuple[str, str]) -> None:
    """Norms, and biases that are added after the sum; nothing whole by mistake."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    for param in family.param_specs(spec):
        norm = "norm." in param.name
        after_sum = param.name.endswith(("attn.o.bias", "ff.down.bias"))
        whole = norm or after_sum or param.name == "positions.weight"
        assert isinstance(_placement(layouts, param), Replicate) == whole, param.name


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_parts_of_one_product_are_cut_alike(row: tuple[str, str]) -> None:
    """A row-split matrix takes what column-split ones give; a bias goes with its rows."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    params = {param.name: param for param in family.param_specs(spec)}
    for layer in range(2):
        block = f"layers.{layer}."
        joints = {
            "attn.o": (["attn.q"], Shard(1, "head")),
            "ff.down": ([x for x in ("ff.gate", "ff.up") if block + x in layouts], Shard(1)),
            "attn.v": (["attn.k"], Shard(0, "kv_head")),
        }
        for name, (others, placement) in joints.items():
            size = params[f"{block}{name}.weight"].shape[placement.dim]
            assert layouts[block + name].params["weight"] == placement
            for other in others:
                assert layouts[block + other].params["weight"] == Shard(0, placement.by)
                assert params[f"{block}{other}.weight"].shape[0] == size
    for param in params.values():
        found = _placement(layouts, param)
        if isinstance(found, Shard) and param.name.endswith("bias"):
            assert layouts[param.name.removesuffix(".bias")].params["weight"] == found


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_sharded_sizes_divide(row: tuple[str, str]) -> None:
    """By whole heads as far as there are key heads, by two at least; tables by two unless the
    published vocabulary is odd."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    ways = next(w for w in (8, 4, 2, 1) if spec.num_kv_heads % w == 0 and spec.num_heads % w == 0)
    for param in family.param_specs(spec):
        placement = _placement(layouts, param)
        if isinstance(placement, Replicate):
            continue
        size = param.shape[placement.dim]
        if "attn." in param.name:
            assert size % (ways * spec.d_head) == 0, (param.name, ways)
        elif "ff." in param.name:
            assert size % 8 == 0, param.name
        else:
            assert size == spec.vocab_size, param.name


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_gathered_and_scattered_in_turn(family: str) -> None:
    spec = FAMILIES[family].sizes["debug-1m"]
    layouts = FAMILIES[family].layout(spec)
    seq, whole = Shard(1), Replicate()
    assert layouts["embed"].gives == seq
    for layer in range(spec.num_layers):
        for outer, end in (("attn", "attn.o"), ("ff", "ff.down")):
            assert layouts[f"layers.{layer}.{outer}"].takes == whole
            assert layouts[f"layers.{layer}.{end}"].gives == seq
    untied = FAMILIES[family].layout(replace(spec, tied=False))
    assert untied["head"].takes == whole
    assert "head" not in FAMILIES[family].layout(replace(spec, tied=True))
