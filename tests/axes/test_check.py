"""What would be computed wrong along an axis is refused, by the layout alone: no torch, no rank."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from weft.axes.check import check_layout, divided_form
from weft.axes.registry import AXES
from weft.axes.tp.axis import TensorParallel
from weft.config.errors import ConfigError
from weft.models.registry import FAMILIES
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Layout, Partial, Replicate, Shard

WIDTH, SEQ = Dim(name="d_model", size=4), Dim(name="seq", size=8)
HIDDEN = Dim(name="d_ff", size=6, width=True)
STREAM = (SAMPLES, SEQ, WIDTH)
ENTERS, LEAVES = Edge(STREAM, "stream", "inner"), Edge(STREAM, "inner", "stream")
MATRIX = Layout(params={"weight": (WIDTH, WIDTH)})
TP = TensorParallel()


class Between(TensorParallel):
    """Divides the sequence between modules, and nothing inside them."""

    name = "sp"
    kinds = MappingProxyType({"Pool": "OwnPool"})

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form == "stream"


SP = Between()


def refusal(layout: dict[str, Layout], axis: TensorParallel = SP) -> str:
    with pytest.raises(ConfigError) as refused:
        check_layout(layout, axis)
    return str(refused.value)


def test_a_module_that_all_ranks_compute_whole_is_refused() -> None:
    """Each would have the whole gradient of its weight, and ranks add them up."""
    layout = {"mlp": replace(MATRIX, takes={0: ENTERS})}
    assert refusal(layout) == (
        "layout.mlp.takes[0] = 'Shard(dim=1) -> Replicate() along sp': expected that only of a "
        "module with a part that sp divides. Every rank would compute the same whole, and its "
        "gradients would be counted once a rank. Take it as it travels (no `takes`), give the "
        "parameters a dimension that sp divides, or give back with `gives` what was cut."
    )
    assert refusal(layout, TP).startswith("layout.mlp.takes[0] = 'Shard(dim=1) -> Replicate() ")


def test_a_module_whose_result_or_weight_is_divided_again_is_not() -> None:
    check_layout({"mlp": MATRIX}, SP)
    check_layout({"mlp": replace(MATRIX, takes={0: ENTERS}, gives=LEAVES)}, SP)
    inside = {"mlp": Layout(takes={0: ENTERS}), "mlp.up": Layout(params={"weight": (HIDDEN,)})}
    check_layout(inside, TP)
    assert refusal(inside).startswith("layout.mlp.takes[0] = ")
    beside = {"mlp": Layout(takes={0: ENTERS}), "mlp2.up": Layout(params={"weight": (HIDDEN,)})}
    assert refusal(beside, TP).startswith("layout.mlp.takes[0] = ")


def test_what_is_added_up_of_activations_as_they_travel_needs_a_form() -> None:
    """Each rank has a part of the sequence there: it would add up that part alone."""
    pool = Layout(kind="Mean", mixes=SEQ)
    assert refusal({"pool": pool}) == (
        "layout.pool = 'Mean': expected a kind with a split form: Pool. "
        "It mixes seq, of which each rank holds a part."
    )
    assert refusal({"pool": replace(pool, mixes=None, sums=SEQ)}, TP).endswith(
        "It adds up over seq, of which each rank holds a part."
    )
    check_layout({"pool": replace(pool, kind="Pool")}, SP)
    inside = {"attn": Layout(takes={0: ENTERS}, gives=LEAVES), "attn.pool": pool}
    check_layout(inside, SP)  # whole samples come there
    assert divided_form(inside, "attn.pool", SEQ, SP) is None
    assert divided_form({"pool": pool, "attn": inside["attn"]}, "pool", SEQ, SP) == "stream"


def test_a_form_goes_around_those_of_axes_further_inside() -> None:
    class Outer(Between):
        kinds = MappingProxyType({"Linear": "OwnLinear"})

        def divides(self, dim: Dim, form: Form) -> bool:
            return dim == HIDDEN

    layout = {"down": Layout(kind="Linear", sums=HIDDEN)}
    check_layout(layout, Outer())
    with pytest.raises(ConfigError, match=r"layout.down = 'RowLinear': expected a kind with a spl"):
        check_layout(layout, Outer(), [TP])
    around = type("Around", (Outer,), {"kinds": {"RowLinear": "OwnRowLinear"}})
    check_layout(layout, around(), [TP])


def test_a_change_that_the_axis_does_not_make_is_refused() -> None:
    class Bare(Between):
        changes = ()

    assert refusal({"attn": Layout(takes={0: ENTERS}, gives=LEAVES)}, Bare()) == (
        "layout.attn.takes[0] = 'Shard(dim=1) -> Replicate() along sp': expected "
        "no change, for sp makes none."
    )


def test_families_with_attention_run_along_every_axis() -> None:
    for family in FAMILIES.values():
        spec = replace(next(iter(family.sizes.values())), num_layers=1)
        for axis in AXES.values() if spec.num_heads else ():
            check_layout(family.layout(spec), axis)


def test_axes_divide_what_travels_between_modules() -> None:
    """Of what several ranks had whole, gradients would come back to one of them."""
    for name, axis in AXES.items():
        assert any(axis.divides(dim, "stream") for dim in (SAMPLES, SEQ)), name


def test_axes_say_what_their_runtimes_have() -> None:
    from weft.parallel.apply import RUNTIMES

    for name, axis in AXES.items():
        changes = set(RUNTIMES[name].changes) if name in RUNTIMES else set()
        forms = RUNTIMES[name].split_forms if name in RUNTIMES else {}
        assert set(axis.changes) == changes, name
        classes = {kind.__name__: str(form.__name__) for kind, form in forms.items()}
        assert dict(axis.kinds) == classes, name
        assert not any(after is Partial for _, after in axis.changes)
        assert all({before, after} <= {Shard, Replicate, Partial} for before, after in axis.changes)
