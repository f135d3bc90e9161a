"""Borders inside layers: who holds what, what a file says, and what is refused."""

from dataclasses import replace

import pytest

from weft.config.errors import ConfigError
from weft.diagnose.verify import shrink
from weft.models.registry import FAMILIES, param_specs
from weft.plan.borders import blocks, in_parts
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.plan_file import PlanFile
from weft.planner.validate import validate_plan
from weft.report.plan_picture import layers_in_words

FAMILY = FAMILIES["llama"]
SPEC = replace(FAMILY.sizes["debug-1m"], num_layers=4)


def of_layers(*pipelines: tuple[float, ...]) -> Plan:
    """A pipeline for each, which ends its stages there, on a rank for each stage."""
    built, rank = [], 0
    for ends in pipelines:
        stages = []
        for layers in zip((0, *ends), ends, strict=False):
            stages.append(StagePlan(mesh=Mesh.of((rank,)), layers=layers))
            rank += 1
        built.append(PipelinePlan(stages=tuple(stages), samples=2, microbatch=1))
    return Plan(num_layers=4, pipelines=tuple(built))


def holders(plan: Plan, name: str) -> list[int]:
    """Ranks that hold a parameter."""
    (spec,) = (spec for spec in param_specs(SPEC) if spec.name == name)
    return [stage.mesh.ranks[0] for _, _, stage in plan.stages_with(spec.places)]


def test_what_is_held_by_hand() -> None:
    assert [blocks(layers) for layers in ((0, 1.5), (1.5, 2), (2.5, 2.5), (1.5, 3.5))] == [
        range(2), range(1, 2), range(0), range(1, 4),
    ]  # fmt: skip
    assert in_parts((0.5, 2)) == [(0.5, 1), (1, 2)]
    assert in_parts((0, 2), {1.5, 2.5}) == [(0, 1), (1, 1.5), (1.5, 2)]


def test_each_part_of_a_layer_is_held_where_it_is_computed() -> None:
    """One pipeline cuts layer 1, another layer 2, a third none."""
    plan = of_layers((1.5, 4), (1, 2.5, 4), (4,))
    assert holders(plan, "layers.1.attn.q.weight") == [0, 3, 5]
    assert holders(plan, "layers.1.ff_norm.weight") == [1, 3, 5]
    assert holders(plan, "layers.2.attn_norm.weight") == [1, 3, 5]
    assert holders(plan, "layers.2.ff.down.weight") == [1, 4, 5]
    assert plan.units(0, 0) == {"embed", 0, 1} and plan.units(0, 1) == {1.5, 2, 2.5, 3, "head"}
    assert plan.units(2, 0) == {"embed", 0, 1, 1.5, 2, 2.5, 3, "head"}


def test_a_file_says_halves_and_whole_numbers_as_before() -> None:
    plan = of_layers((1.5, 4.0), (1, 4))
    text = plan.to_json()
    assert Plan.from_json(text) == PlanFile.read(text).plan == plan
    assert "1.5" in text and "4.0" not in text
    assert "." not in of_layers((1, 4.0)).to_json()


def test_words() -> None:
    stages = of_layers((1.5, 2, 2.5, 4)).pipelines[0].stages
    words = [layers_in_words(s, is_first=n == 0, is_last=n == 3) for n, s in enumerate(stages)]
    assert words == [
        "embedding, layers 0, part of 1", "rest of layer 1", "part of layer 2",
        "layers rest of 2, 3, head",
    ]  # fmt: skip


def test_a_rehearsal_with_fewer_layers_keeps_the_cut() -> None:
    little = shrink(replace(of_layers((3.5, 8)), num_layers=8), 4, "fp64")
    assert [stage.layers for _, _, stage in little.stages()] == [(0, 2), (2, 4)]
    little = shrink(replace(of_layers((5, 8)), num_layers=8), 4, "fp64")
    assert [stage.layers for _, _, stage in little.stages()] == [(0, 2), (2, 4)]
    little = shrink(replace(of_layers((1.5, 3, 6)), num_layers=6), 4, "fp64")
    assert [stage.layers for _, _, stage in little.stages()] == [(0, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("plan", "parts", "message"),
    [
        (
            of_layers((1.5, 4)),
            None,
            "pipelines[0].stages[0].layers = [0, 1.5]: expected whole numbers of layers. Layers of "
            "this model cannot be cut: use 1 or 2.",
        ),
        (
            of_layers((1.25, 4)),
            FAMILY.parts,
            "pipelines[0].stages[0].layers = [0, 1.25]: expected layers from 0 to 4, with a "
            "half where one is cut.",
        ),
        (
            of_layers((1.5, 3.5)),
            FAMILY.parts,
            "pipelines[0].stages.layers = [[0, 1.5], [1.5, 3.5]]: expected all 4 layers, each "
            "once.",
        ),
    ],
)
def test_refusals(plan: Plan, parts: tuple[str, str] | None, message: str) -> None:
    validate_plan(of_layers((1.5, 4)), num_layers=4, global_batch=2, parts=FAMILY.parts)
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan, num_layers=4, global_batch=2, parts=parts)
    assert str(caught.value) == message


@pytest.mark.parametrize("written", ["1e30", "-0.5", "null", '"2"', "true", "NaN"])
def test_a_file_may_say_anything_of_layers(written: str) -> None:
    plan = Plan.from_json(of_layers((1.5, 4)).to_json().replace("1.5", written))
    with pytest.raises(ConfigError, match=r"layers = \[0, .*\]: expected layers from 0 to 4, with"):
        validate_plan(plan, num_layers=4, global_batch=2, parts=FAMILY.parts)


def test_neighbours_that_do_not_agree_are_refused() -> None:
    plan = of_layers((1.5, 4))
    first, second = plan.pipelines[0].stages
    stages = (first, replace(second, layers=(1, 4)))
    overlapping = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    with pytest.raises(ConfigError) as caught:
        validate_plan(overlapping, num_layers=4, global_batch=2, parts=FAMILY.parts)
    assert str(caught.value) == (
        "pipelines[0].stages[1].layers = [1, 4]: expected a range that starts at layer 1.5."
    )
