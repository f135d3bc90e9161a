"""Every family's layout names every parameter and what belongs together, at all published sizes."""

from dataclasses import replace

import pytest

from weft.axes.check import change_along, check_layout, divided_form
from weft.axes.held import placement
from weft.axes.tp.axis import TensorParallel
from weft.models.registry import FAMILIES, dims_of_param, modules_of
from weft.parallel.apply import check_entries
from weft.plan.layout import Dim, Layout, Partial, Replicate, Shard
from weft.plan.model import ModelSpec, ParamSpec

ROWS = [(family, size) for family in FAMILIES for size in FAMILIES[family].sizes]
TP = TensorParallel()


def _two_layers(row: tuple[str, str]) -> ModelSpec:
    return replace(FAMILIES[row[0]].sizes[row[1]], num_layers=2)


def _divided(layouts: dict[str, Layout], param: ParamSpec) -> Dim | None:
    """The dimension of a parameter that tensor parallelism divides."""
    dims = dims_of_param(param, layouts)
    found = placement(dims, "param", TP)
    return dims[found.dim] if isinstance(found, Shard) else None


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_layout_names_each_parameter_and_no_other(row: tuple[str, str]) -> None:
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    named = {
        f"{module}.{own}" for module, entry in family.layout(spec).items() for own in entry.params
    }
    assert named == {param.name for param in family.param_specs(spec)}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_layout_names_the_modules_of_the_model(row: tuple[str, str]) -> None:
    """Each, and its class where it sums or mixes; tensor parallelism runs them all."""
    spec = _two_layers(row)
    layout = FAMILIES[spec.family].layout(spec)
    check_entries(layout, modules_of(spec))
    check_layout(layout, TP)
    assert all(entry.kind for entry in layout.values() if entry.sums or entry.mixes)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_only_small_vectors_and_the_positions_are_whole(row: tuple[str, str]) -> None:
    """Norms, and biases that are added after the sum; nothing whole by mistake."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    for param in family.param_specs(spec):
        norm = "norm." in param.name
        if norm and layouts[param.name.rpartition(".")[0]].sums is not None:  # over all heads
            norm = False
        after_sum = param.name.endswith(("attn.o.bias", "ff.down.bias"))
        of_gate = param.name.endswith(("ff.router.weight", "ff.router.bias", "shared.gate.weight"))
        low = param.name.endswith(("attn.q_down.weight", "attn.kv_down.weight"))
        whole = norm or after_sum or of_gate or low or param.name == "positions.weight"
        assert (_divided(layouts, param) is None) == whole, param.name


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_parts_of_one_product_are_cut_alike(row: tuple[str, str]) -> None:
    """A matrix that sums over a dimension takes what others give; a bias goes with its rows."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    params = {param.name: param for param in family.param_specs(spec)}
    for layer in range(2):
        block = f"layers.{layer}."
        joints = {
            "attn.o": (["attn.q"], "heads"),
            "ff.down": ([x for x in ("ff.gate", "ff.up") if block + x in layouts], "d_ff"),
        }
        entry = layouts[f"{block}ff"]
        if entry.sums is not None:  # experts make a term together
            del joints["ff.down"]
        if spec.latent is not None or not spec.num_heads:
            del joints["attn.o"]
        if entry.sums is not None:
            wide = [layouts[f"{block}ff.{name}"].params["weight"] for name in ("gate", "up")]
            down = layouts[f"{block}ff.down"].params["weight"]
            assert {dims[1] for dims in wide} == {down[2], entry.sums}
        for name, (others, dim) in joints.items():
            sums = layouts[block + name].sums
            assert sums is not None and sums.name == dim
            assert layouts[block + name].params["weight"][1] == sums
            for other in others:
                assert layouts[block + other].params["weight"][0] == sums
        if spec.latent is not None:
            made = [n for n in ("attn.q", "attn.q_up", "attn.kv_up") if block + n in layouts]
            dims = [layouts[block + name].params["weight"][0] for name in made]
            dims.append(layouts[f"{block}attn.o"].params["weight"][1])
            assert {(dim.groups, dim.units) for dim in dims} == {(spec.num_heads, 1)}
            continue
        if spec.num_heads:
            keys, values = (layouts[f"{block}attn.{name}"].params["weight"] for name in "kv")
            assert keys == values and keys[0].name == "kv_heads"
    for param in params.values():
        divided = _divided(layouts, param)
        if divided is not None and param.name.endswith("bias"):
            assert layouts[param.name.removesuffix(".bias")].params["weight"][0] == divided


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_divided_sizes_divide(row: tuple[str, str]) -> None:
    """By whole heads as far as there are key heads, by two at least; tables by two unless the
    published vocabulary is odd."""
    spec = _two_layers(row)
    family = FAMILIES[spec.family]
    layouts = family.layout(spec)
    ways = next(w for w in (8, 4, 2, 1) if spec.num_kv_heads % w == 0 and spec.num_heads % w == 0)
    for param in family.param_specs(spec):
        divided = _divided(layouts, param)
        if divided is None:
            continue
        if "attn." in param.name:
            assert divided.num_groups % ways == 0, (param.name, ways)
        elif "ff." in param.name:
            assert divided.size % 8 == 0, param.name
        else:
            assert divided.size == spec.vocab_size, param.name


def _taken(layouts: dict[str, Layout], where: str) -> object:
    return change_along(TP, layouts[where].takes[0])


def _given(layouts: dict[str, Layout], where: str) -> object:
    entry = layouts[where]
    assert entry.gives is not None and entry.sums is not None
    term = divided_form(layouts, where, entry.sums, TP) == "inner"
    return change_along(TP, entry.gives, term=term)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_gathered_and_scattered_in_turn(family: str) -> None:
    spec = FAMILIES[family].sizes["debug-1m"]
    layouts = FAMILIES[family].layout(spec)
    gathered, scattered = (Shard(1), Replicate()), (Partial(), Shard(1))
    assert _given(layouts, "embed") == scattered
    for layer in range(spec.num_layers):
        for outer, end in (("attn", "attn.o"), ("ff", "ff.down"))[not spec.num_heads :]:
            assert _taken(layouts, f"layers.{layer}.{outer}") == gathered
            assert _given(layouts, f"layers.{layer}.{end}") == scattered
    assert _taken(layouts, "cross_entropy") == gathered
    untied = FAMILIES[family].layout(replace(spec, tied=False))
    assert untied["head"].params == untied["embed"].params
    assert "head" not in FAMILIES[family].layout(replace(spec, tied=True))
