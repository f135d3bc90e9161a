"""The one applier: every entry of a layout has an effect, or is refused by name."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.axes.axis import Axis
from weft.axes.tp.axis import TensorParallel
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.models.registry import FAMILIES, module_names
from weft.parallel.apply import RUNTIMES, apply_layout, axis_groups, refuse_strangers
from weft.parallel.runtime import Runtime
from weft.parallel.tensor.modules import RowLinear
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Layout, Partial, Replicate, Shard
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Seat, StagePlan

WIDTH, HIDDEN, SEQ = Dim(name="d_model", size=4), Dim(name="d_ff", size=6), Dim(name="seq", size=8)
STREAM = (SAMPLES, SEQ, WIDTH)


def seat_of(mesh: Mesh) -> Seat:
    stages = (StagePlan(mesh=mesh, layers=(0, 1)),)
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=4)
    return Plan(num_layers=1, pipelines=(pipeline,)).seat(0)


def apply(
    model: nn.Module, layout: dict[str, Layout], mesh: Mesh | None = None, **tables: Any
) -> None:
    seat = seat_of(mesh or Mesh.of((0, 1), tp=2))
    apply_layout(model, layout, seat, Comm(), sizes={"seq": 8}, **tables)


def refusal(model: nn.Module, layout: dict[str, Layout], **tables: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        apply(model, layout, **tables)
    return str(refused.value)


class Scaled(nn.Linear):
    """A kind of module of its own."""


class Convolution(nn.Module):
    """A kind that nobody taught to compute with a part."""


def model(down: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"up": nn.Linear(4, 6), "down": down})


def test_an_entry_that_names_no_module_is_refused() -> None:
    spec = FAMILIES["llama"].sizes["debug-1m"]
    layout = FAMILIES["llama"].layout(spec)
    names = module_names(spec)
    refuse_strangers(layout, names)
    with pytest.raises(ConfigError) as refused:
        refuse_strangers({**layout, "layers.0.attn.w": Layout()}, names)
    assert str(refused.value) == (
        "layout = 'layers.0.attn.w': expected the name of a module of the model."
    )


def test_a_change_that_is_not_in_the_table_is_refused() -> None:
    edge = Edge((SAMPLES, SEQ, HIDDEN), "stream", "inner")
    assert refusal(model(nn.Linear(6, 4)), {"down": Layout(takes={0: edge})}) == (
        "layout.down.takes[0] = 'Shard(dim=1) -> Shard(dim=2) along tp': expected one of "
        "Shard -> Replicate, Partial -> Shard, Replicate -> Shard."
    )


def test_a_sum_that_stays_in_terms_is_refused() -> None:
    edge = Edge(STREAM, "inner", "inner")
    layout = {"down": Layout(sums=HIDDEN, gives=edge)}
    assert refusal(model(nn.Linear(6, 4)), layout).startswith(
        "layout.down.gives = 'Partial() -> Replicate() along tp': expected one of "
    )


def test_a_kind_of_module_that_cannot_sum_in_parts_is_refused() -> None:
    layout = {"down": Layout(sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))}
    assert refusal(model(Convolution()), layout) == (
        "layout.down = 'Convolution': expected a kind with a split form: Linear, Embedding, "
        "LinearCrossEntropy. It adds up over d_ff, of which each rank holds a part."
    )


def test_an_axis_without_a_runtime_is_refused_where_it_would_have_to_do_something() -> None:
    layout = {"up": Layout(takes={0: Edge(STREAM, "stream", "inner")})}
    assert refusal(model(nn.Linear(6, 4)), layout, runtimes={}).startswith("layout.up.takes[0] = ")
    apply(model(nn.Linear(6, 4)), layout, Mesh.of((0, 1), dp=2), runtimes={})


def test_kinds_take_the_form_of_the_kind_they_are_made_from() -> None:
    layout = {"down": Layout(sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))}
    made = model(Scaled(6, 4))
    apply(made, layout)
    assert isinstance(made["down"], RowLinear)
    assert {name for name, _ in made.named_parameters()} >= {"up.weight", "down.bias"}


def test_nothing_changes_along_axes_of_one_rank() -> None:
    layout = {"down": Layout(sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))}
    made = model(Convolution())
    apply(made, layout, Mesh.of((0,)))
    assert type(made["down"]) is Convolution


class Channels(Axis):
    """A toy axis in the place of another: each rank takes a part of the channels."""

    name = "cp"

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "d_model" and form == "stream"

    def part(self, dim: Dim, ways: int, position: int) -> tuple[range, ...]:
        width = dim.size // ways
        return (range(position * width, (position + 1) * width),)

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return all(dim.size % ways == 0 for dim in dims)

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        raise NotImplementedError


class Doubling(nn.Module):
    def forward(self, x: Tensor, scale: float, y: Tensor) -> Tensor:
        return scale * (x + y)


def test_an_axis_and_a_kind_of_module_bring_their_own() -> None:
    """Tables are arguments: what they hold is all there is."""
    from weft.plan.layout import Shard

    seen: list[tuple[object, object]] = []

    def change(group: Any, before: Any, after: Any) -> Any:
        seen.append((before, after))
        return lambda x: x + group.size

    runtime = Runtime({(Shard, Replicate): change, (Replicate, Shard): change}, {})
    module = nn.ModuleDict({"doubling": Doubling()})
    edge = Edge(STREAM, "stream", "inner")
    layout = {"doubling": Layout(takes={2: edge}, gives=Edge(STREAM, "inner", "stream"))}
    apply(
        module,
        layout,
        Mesh.of((0, 1), cp=2),
        axes={"cp": Channels()},
        runtimes={"cp": runtime},
    )
    given = module["doubling"](torch.zeros(1), 2.0, torch.ones(1))
    assert given.item() == 2.0 * (0 + 3) + 2
    assert [(type(a.placement), a.parts) for pair in seen for a in pair] == [  # type: ignore[attr-defined]
        (Shard, (2, 2)),
        (Replicate, ()),
        (Replicate, ()),
        (Shard, (2, 2)),
    ]


def test_groups_are_those_of_axes_that_have_a_runtime() -> None:
    plan = seat_of(Mesh.of(range(4), dp=2, tp=2)).plan
    assert axis_groups(plan) == [(0, 1), (2, 3)]
    assert Partial not in {after for _, after in RUNTIMES["tp"].changes}


class Sequence(Channels):
    """Another: each rank takes a part of the sequence, also where modules compute."""

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form in ("stream", "inner")


class Told(nn.Module):
    """A kind of module that knows which part of a dimension it has."""

    def __init__(self, inside: nn.Module, share: Any) -> None:
        super().__init__()
        self.inside, self.first = inside, share.first


def along_sequence(layout: dict[str, Layout], forms: dict[Any, Any]) -> nn.ModuleDict:
    made = model(Convolution())
    tables = {"axes": {"cp": Sequence()}, "runtimes": {"cp": Runtime({}, forms)}}
    apply(made, layout, Mesh.of((0, 1), cp=2), **tables)
    return made


def test_a_module_that_mixes_what_is_divided_gets_another_form() -> None:
    layout = {"down": Layout(takes={0: Edge(STREAM, "stream", "inner")}, mixes=SEQ)}
    made = along_sequence(layout, {Convolution: Told})
    assert isinstance(made["down"], Told)
    assert made["down"].first == 0
    with pytest.raises(
        ConfigError, match=r"layout.down = 'Convolution': .* It mixes seq, of which"
    ):
        along_sequence(layout, {nn.Linear: Told})


def test_what_is_divided_and_looked_at_by_no_module_is_refused() -> None:
    """A layout that was written before the axis would give other numbers in silence."""
    layout = {"down": Layout(takes={0: Edge(STREAM, "stream", "inner")})}
    with pytest.raises(ConfigError) as refused:
        along_sequence(layout, {Convolution: Told})
    assert str(refused.value) == (
        "layout.down = 'seq': expected a dimension that some module of the layout sums or mixes. "
        "cp gives each rank a part of it to compute with."
    )


class Between(Axis):
    """Divides the sequence between modules, as tensor parallelism does too."""

    name = "cp"

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form == "stream"

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return True

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        pass


@pytest.mark.parametrize(
    ("forms", "kinds", "expected"),
    [
        (("batch", "stream"), (Replicate, Shard), [("cp", (4, 4)), ("tp", (2, 2))]),
        (("stream", "inner"), (Shard, Replicate), [("tp", (2, 2)), ("cp", (4, 4))]),
    ],
)
def test_two_axes_on_one_dimension_cut_from_outside_and_gather_from_inside(
    forms: tuple[Form, Form], kinds: tuple[type, type], expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    called: list[tuple[str, tuple[int, ...]]] = []

    def change(name: str) -> Any:
        def make(_group: object, before: Any, after: Any) -> Any:
            parts = after.parts if kinds[1] is Shard else before.parts

            def call(x: Tensor) -> Tensor:
                called.append((name, parts))
                return x

            return call

        return make

    made = nn.ModuleDict({"up": nn.Identity()})
    layout = {"up": Layout(takes={0: Edge((SAMPLES, SEQ, WIDTH), *forms)})}
    runtimes = {name: Runtime({kinds: change(name)}, {}) for name in ("cp", "tp")}
    axes = {"cp": Between(), "tp": TensorParallel()}
    apply(made, layout, Mesh.of(range(4), cp=2, tp=2), axes=axes, runtimes=runtimes)
    made["up"](torch.zeros(1))
    assert called == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 4)


class Around(nn.Module):
    def __init__(self, inside: nn.Module, _total: object) -> None:
        super().__init__()
        self.inside = inside


class Both(Between):
    """Divides hidden channels inside modules too."""

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name in {"d_ff", "seq"}


def test_a_form_around_a_module_keeps_the_forms_inside() -> None:
    made = nn.ModuleDict({"block": Block()})
    edge = Edge((SAMPLES, SEQ, WIDTH), "stream", "inner")
    layout = {"block": Layout(takes={0: edge}, mixes=SEQ), "block.down": Layout(sums=HIDDEN)}
    runtimes = {"cp": Runtime({}, {Block: Around, nn.Linear: Around})}
    apply(made, layout, Mesh.of((0, 1), cp=2), axes={"cp": Both()}, runtimes=runtimes)
    block = made["block"]
    assert isinstance(block, Around) and isinstance(block.inside, Block)
    assert isinstance(block.inside.down, Around)


def test_a_form_whose_place_another_axis_has_taken_is_refused() -> None:
    made = nn.ModuleDict({"block": Block()})
    edge = Edge((SAMPLES, SEQ, WIDTH), "stream", "inner")
    layout = {"block": Layout(takes={0: edge}, mixes=SEQ), "block.down": Layout(sums=HIDDEN)}
    runtimes = {
        "cp": Runtime({}, {nn.Linear: Around}),
        "tp": Runtime({}, {Block: Around}),
    }

    class Widths(Between):
        def divides(self, dim: Dim, form: Form) -> bool:
            return dim.name == "d_ff"

    class Seq(Between):
        name = "tp"

        def divides(self, dim: Dim, form: Form) -> bool:
            return dim.name == "seq"

    mesh, axes = Mesh.of(range(4), cp=2, tp=2), {"cp": Widths(), "tp": Seq()}
    with pytest.raises(ConfigError, match="a place that no form of another axis has taken"):
        apply(made, layout, mesh, axes=axes, runtimes=runtimes)
