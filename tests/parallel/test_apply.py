"""The one applier: every entry of a layout has an effect, or is refused by name."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.axes.axis import Axis
from weft.axes.tp.axis import TensorParallel
from weft.comm.comm import Comm
from weft.comm.members import Member
from weft.config.errors import ConfigError
from weft.models.registry import FAMILIES, modules_of
from weft.nn.losses import LinearCrossEntropy
from weft.parallel.apply import RUNTIMES, apply_layout, axis_groups, check_entries
from weft.parallel.runtime import AxisGroup, Runtime, Sum
from weft.parallel.tp.modules import RowLinear, VocabCrossEntropy
from weft.plan.layout import SAMPLES, Dim, Edge, Form, Layout, Partial, Replicate, Shard
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, RankPlan, StagePlan

WIDTH, SEQ = Dim(name="d_model", size=4), Dim(name="seq", size=8)
HIDDEN = Dim(name="d_ff", size=6, width=True)
STREAM = (SAMPLES, SEQ, WIDTH)
CP = Mesh.of((0, 1), cp=2)


def rank_plan_of(mesh: Mesh) -> RankPlan:
    stages = (StagePlan(mesh=mesh, layers=(0, 1)),)
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=4)
    return Plan(num_layers=1, pipelines=(pipeline,)).rank_plan(0)


def apply(
    model: nn.Module, layout: dict[str, Layout], mesh: Mesh | None = None, **tables: Any
) -> None:
    rank_plan = rank_plan_of(mesh or Mesh.of((0, 1), tp=2))
    apply_layout(model, layout, rank_plan, Comm(0, 4), sizes={"seq": 8}, **tables)


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
    modules = modules_of(spec)
    check_entries(layout, modules)
    with pytest.raises(ConfigError) as refused:
        check_entries({**layout, "layers.0.attn.w": Layout()}, modules)
    assert str(refused.value) == (
        "layout = 'layers.0.attn.w': expected the name of a module of the model."
    )
    with pytest.raises(ConfigError) as refused:
        check_entries({**layout, "embed": Layout(kind="Linear")}, modules)
    assert str(refused.value) == (
        "layout.embed.kind = 'Linear': expected the module's class, Embedding."
    )


def test_a_module_without_an_entry_is_refused() -> None:
    """What adds up over a dimension that an axis cuts would give other numbers in silence."""
    made = nn.ModuleDict({"pool": Convolution(), "list": nn.ModuleList([nn.Linear(2, 2)])})
    modules = dict(made.named_modules())
    layout = {"pool": Layout(), "list.0": Layout()}
    check_entries(layout, modules)
    with pytest.raises(ConfigError) as refused:
        check_entries({"list.0": Layout()}, modules)
    assert str(refused.value) == (
        "layout = 'Convolution pool': expected an entry for every module. "
        "An axis could cut what it adds up or mixes. Layout() says that it does neither."
    )
    with pytest.raises(ConfigError, match=r"layout = 'Convolution': expected an entry"):
        check_entries({}, {"": Convolution()})


def test_a_change_that_is_not_in_the_table_is_refused() -> None:
    edge = Edge((SAMPLES, SEQ, HIDDEN), "stream", "inner")
    assert refusal(model(nn.Linear(6, 4)), {"down": Layout(takes={0: edge})}) == (
        "layout.down.takes[0] = 'Shard(dim=1) -> Shard(dim=2) along tp': expected one of "
        "Shard -> Replicate, Partial -> Shard, Replicate -> Shard."
    )


def test_a_sum_that_stays_in_terms_is_refused() -> None:
    edge = Edge(STREAM, "inner", "inner")
    layout = {"down": Layout(kind="Linear", sums=HIDDEN, gives=edge)}
    assert refusal(model(nn.Linear(6, 4)), layout).startswith(
        "layout.down.gives = 'Partial() -> Replicate() along tp': expected one of "
    )


def test_a_kind_of_module_that_cannot_sum_in_parts_is_refused() -> None:
    layout = {
        "down": Layout(kind="Convolution", sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))
    }
    assert refusal(model(Convolution()), layout) == (
        "layout.down = 'Convolution': expected a kind with a split form: Linear, Embedding, "
        "LinearCrossEntropy, RowsLoss, Experts, RMSNorm. "
        "It adds up over d_ff, of which each rank holds a part."
    )


def test_an_axis_without_a_runtime_is_refused_where_it_would_have_to_do_something() -> None:
    layout = {"up": Layout(takes={0: Edge(STREAM, "stream", "inner")})}
    axes: dict[str, Axis] = {"cp": Sequence()}
    apply(model(nn.Linear(6, 4)), {"up": Layout()}, CP, axes=axes, runtimes={})
    with pytest.raises(ConfigError, match=r"layout.up = 'seq': expected a dimension that some"):
        apply(model(nn.Linear(6, 4)), layout, CP, axes=axes, runtimes={})
    with pytest.raises(ConfigError, match=r"expected no change, for cp makes none"):
        apply(model(nn.Linear(6, 4)), layout, CP, axes={"cp": Between()}, runtimes={})
    apply(model(nn.Linear(6, 4)), layout, Mesh.of((0, 1), dp=2), runtimes={})


def test_kinds_take_the_form_of_the_kind_they_are_made_from() -> None:
    layout = {"down": Layout(kind="Linear", sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))}
    made = model(Scaled(6, 4))
    apply(made, layout)
    assert isinstance(made["down"], RowLinear)
    assert {name for name, _ in made.named_parameters()} >= {"up.weight", "down.bias"}


def test_nothing_changes_along_axes_of_one_rank() -> None:
    layout = {"down": Layout(kind="Linear", sums=HIDDEN, gives=Edge(STREAM, "inner", "stream"))}
    made = model(Convolution())
    apply(made, layout, Mesh.of((0,)))
    assert type(made["down"]) is Convolution


class Channels(Axis):
    """A toy axis in the place of another: each rank takes a part of the channels."""

    name = "cp"
    changes = ((Shard, Replicate), (Replicate, Shard))

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "d_model" and form == "stream"

    def part(
        self,
        dim: Dim,
        ways: int,
        position: int,
        shares: tuple[int, ...] = (),
    ) -> tuple[range, ...]:
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
    plan = rank_plan_of(Mesh.of(range(4), dp=2, tp=2)).plan
    assert axis_groups(plan, [Member()] * 4) == [(0, 1), (2, 3)]
    alone = rank_plan_of(Mesh.of(range(2), dp=2)).plan
    assert axis_groups(alone, [Member()] * 2) == []  # nobody talks to itself
    assert Partial not in {after for _, after in RUNTIMES["tp"].changes}


class Sequence(Channels):
    """Another: each rank takes a part of the sequence, also where modules compute."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = dict.fromkeys(kinds, "Told")

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form in ("stream", "inner")


class Told(nn.Module):
    """A kind of module that knows which part of a dimension it has."""

    def __init__(self, inside: nn.Module, share: Any) -> None:
        super().__init__()
        self.inside, self.held, self.parts = inside, share.held, share.parts


def along_sequence(layout: dict[str, Layout], forms: dict[Any, Any]) -> nn.ModuleDict:
    made = model(Convolution())
    axis = Sequence(*(kind.__name__ for kind in forms))
    apply(made, layout, CP, axes={"cp": axis}, runtimes={"cp": Runtime({}, forms)})
    return made


def test_a_module_that_mixes_what_is_divided_gets_another_form() -> None:
    edge = Edge(STREAM, "stream", "inner")
    layout = {"down": Layout(kind="Convolution", takes={0: edge}, mixes=SEQ)}
    made = along_sequence(layout, {Convolution: Told})
    assert isinstance(made["down"], Told)
    assert made["down"].held == (range(4),)
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

    def __init__(self, *kinds: str, changes: Collection[tuple[Any, Any]] = ()) -> None:
        self.kinds, self.changes = dict.fromkeys(kinds, "Around"), changes

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
    back = Edge(STREAM, "inner", "stream") if forms[1] == "inner" else None
    layout = {"up": Layout(takes={0: Edge(STREAM, *forms)}, gives=back)}
    same = {(Replicate, Shard): lambda *_: lambda x: x}
    runtimes = {name: Runtime({**same, kinds: change(name)}, {}) for name in ("cp", "tp")}
    axes = {"cp": Between(changes=runtimes["cp"].changes), "tp": TensorParallel()}
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
    block = Layout(kind="Block", takes={0: edge}, mixes=SEQ)
    layout = {"block": block, "block.down": Layout(kind="Linear", sums=HIDDEN)}
    runtimes = {"cp": Runtime({}, {Block: Around, nn.Linear: Around})}
    apply(
        made, layout, Mesh.of((0, 1), cp=2), axes={"cp": Both("Block", "Linear")}, runtimes=runtimes
    )
    found = made["block"]
    assert isinstance(found, Around) and isinstance(found.inside, Block)
    assert isinstance(found.inside.down, Around)


def test_a_form_around_a_module_hides_none_from_another_axis() -> None:
    """That of the inner axis takes the place of the block, in which the outer one has a form."""
    made = nn.ModuleDict({"block": Block()})
    edge = Edge((SAMPLES, SEQ, WIDTH), "stream", "inner")
    block = Layout(kind="Block", takes={0: edge}, mixes=SEQ)
    layout = {"block": block, "block.down": Layout(kind="Linear", sums=HIDDEN)}
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

    mesh, axes = Mesh.of(range(4), cp=2, tp=2), {"cp": Widths("Linear"), "tp": Seq("Block")}
    apply(made, layout, mesh, axes=axes, runtimes=runtimes)
    found = made["block"]
    assert isinstance(found, Around) and isinstance(found.inside, Block)
    assert isinstance(found.inside.down, Around)


def test_the_model_itself_comes_after_all_inside_it() -> None:
    made: list[str] = []

    def form(module: nn.Module, total: object) -> nn.Module:
        made.append(type(module).__name__)
        return Around(module, total)

    root = Layout(kind="Block", takes={0: Edge(STREAM, "stream", "inner")}, mixes=SEQ)
    layout = {"": root, "down": Layout(kind="Linear", sums=HIDDEN)}
    runtimes = {"cp": Runtime({}, {Block: form, nn.Linear: form})}
    with pytest.raises(ConfigError, match=r"layout. = 'Block': expected a module inside the model"):
        apply(Block(), layout, CP, axes={"cp": Both("Block", "Linear")}, runtimes=runtimes)
    assert made == ["Linear", "Block"]


class Zigzag(Sequence):
    """Each rank has a range from the start and one from the end."""

    def part(
        self,
        dim: Dim,
        ways: int,
        position: int,
        shares: tuple[int, ...] = (),
    ) -> tuple[range, ...]:
        each = dim.size // (2 * ways)
        ends = (position, 2 * ways - 1 - position)
        return tuple(range(n * each, (n + 1) * each) for n in ends)


def test_a_form_is_told_all_ranges_of_its_rank() -> None:
    layout = {"down": Layout(kind="Convolution", mixes=SEQ)}
    made = model(Convolution())
    runtimes = {"cp": Runtime({}, {Convolution: Told})}
    apply(made, layout, CP, axes={"cp": Zigzag("Convolution")}, runtimes=runtimes)
    assert made["down"].held == (range(2), range(6, 8))
    assert made["down"].parts == ((range(2), range(6, 8)), (range(2, 4), range(4, 6)))
    total = Sum(AxisGroup(Comm(0, 4), (0, 1)), made["down"].held, made["down"].parts, None)
    with pytest.raises(AssertionError, match=r"several ranges: \(range\(0, 2\), range\(6, 8\)\)"):
        VocabCrossEntropy(LinearCrossEntropy(), total)
