"""The parts of a layer cost what the layer does; each alone by its own parameters."""

from dataclasses import replace

import pytest

from weft.cost.activations import stage_kept, stage_working
from weft.cost.choice import StageChoice, by_layer
from weft.cost.memory import stage_params
from weft.cost.rates import Roofline
from weft.cost.sends import layer_sends
from weft.cost.timing import Hardware, Software, stage_times
from weft.cost.traffic import Fabric
from weft.cost.work import StageWork, layers_by_kind
from weft.models.registry import FAMILIES, param_specs, shape_of
from weft.plan.borders import Layers, in_parts
from weft.plan.model import ModelSpec
from weft.recompute.asked import modes_of_layer, slabs_of

GPT2, LLAMA = (next(iter(FAMILIES[name].sizes.values())) for name in ("gpt2", "llama"))
QWEN = replace(LLAMA, qkv_bias=True, dropout=0.1)
SPECS = pytest.mark.parametrize("spec", [GPT2, LLAMA, QWEN], ids=["gpt2", "llama", "biases"])
FABRIC = Fabric(chips_per_node=8, inside_bytes_s=1e9, across_bytes_s=1e8)
CHIP = Roofline(
    flops_s=1e12, fp8_flops_s=1e12, fp32_flops_s=1e12, attention_flops_s=1e12, bytes_s=1e10
)
WORK = StageWork(layers=(1, 2), embeds=False, predicts=False, samples=2, seq_len=64)
HALVES = (1, 1.5), (1.5, 2)


@SPECS
def test_parameters_are_those_of_the_model(spec: ModelSpec) -> None:
    params = [param for param in param_specs(spec) if param.unit == 1]
    for layers in HALVES:
        own = sum(param.numel for param in params if param.places == {layers[0]})
        assert own == pytest.approx(
            stage_params(shape_of(spec), layers, (), embeds=False, predicts=False)[0]
        )


@SPECS
@pytest.mark.parametrize("recompute", [(), ((("attention", "activation"), 1.0),)])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_parts_add_up_to_the_layer(spec: ModelSpec, recompute: object, dtype: str) -> None:
    shape, axes = shape_of(spec), (("tp", 2),)
    work = WORK._replace(recompute=recompute, dtype=dtype, axes=axes)
    whole, *parts = (work._replace(layers=layers) for layers in ((1, 2), *HALVES))
    kept = [stage_kept(shape, part) for part in parts]
    assert min(kept) > 0 and sum(kept) == pytest.approx(stage_kept(shape, whole))
    sums = [
        [s.times for kind, _ in layers_by_kind(shape, each.layers)
         for s in layer_sends(shape, each, **kind._asdict())]
        for each in (whole, *parts)
    ]  # fmt: skip
    assert sums == [[2], [1], [1]]
    free = Software(layer_s=1e-3, accumulate_bytes=2.0)
    hardware = Hardware(chip=CHIP, fabric=FABRIC, software=free)
    all_of_it, *own = (
        stage_times(shape, StageChoice(work=each, axes=axes), hardware) for each in (whole, *parts)
    )
    for name in ("forward_s", "input_grad_s", "weight_grad_s"):
        seconds = [getattr(each, name) for each in own]
        assert sum(seconds) == pytest.approx(getattr(all_of_it, name), rel=1e-12)
        assert 0 < seconds[0] != seconds[1] > 0


@pytest.mark.parametrize(
    ("layers", "text"),
    [((0.5, 2), "full:1"), ((0.5, 3), "feed_forward+full:1"), ((0, 2.5), "activation:1+full:2"),
     ((0.5, 3.5), "core+attention:1+feed_forward:3")],
)  # fmt: skip
def test_each_layer_makes_again_what_the_plan_says_of_it(layers: Layers, text: str) -> None:
    """The first of a stage may be half of one, and is all that ``full:1`` is about."""
    shape, held = shape_of(LLAMA), in_parts(layers)
    axes = (("tp", 2),)
    mixed = WORK._replace(layers=layers, recompute=slabs_of(text, len(held)), axes=axes)
    alone = [
        mixed._replace(layers=part, recompute=((modes_of_layer(text, number), 1.0),))
        for number, part in enumerate(held)
    ]
    assert stage_kept(shape, mixed) == pytest.approx(sum(stage_kept(shape, e) for e in alone))
    kept = [stage_kept(shape, each) for each in alone]
    most = max(stage_working(shape, e) - sum(kept[n + 1 :]) for n, e in enumerate(alone))
    assert stage_working(shape, mixed) == pytest.approx(most), "later layers' are gone by then"
    hardware = Hardware(chip=CHIP, fabric=FABRIC, software=Software(layer_s=1e-3))
    whole, *parts = (
        stage_times(shape, StageChoice(work=each, axes=axes), hardware) for each in (mixed, *alone)
    )
    assert whole.whole_s == pytest.approx(sum(each.whole_s for each in parts), rel=1e-12)
    by_number = by_layer(StageChoice(work=mixed, axes=axes))
    assert [stage_kept(shape, each.work) for each in by_number] == [
        stage_kept(shape, each) for each in alone
    ]


def test_full_recompute_keeps_what_enters_each_part() -> None:
    """A layer that is cut is kept at its border too."""
    full = WORK._replace(recompute=((("full",), 1.0),))
    enters = 2 * 2 * 64 * LLAMA.d_model
    for layers, many in (((1, 2), 1), ((1, 1.5), 1), ((1.5, 2), 1), ((0.5, 2), 2)):
        kept = stage_kept(shape_of(LLAMA), full._replace(layers=layers))
        assert kept == many * enters
