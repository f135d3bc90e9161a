"""``optim.groups`` of a deeper model: each layer is in the group of the one that it copies."""

from dataclasses import replace
from typing import Any

import pytest

from weft.config.optim_sections import ParamGroupConfig
from weft.grow.groups import groups_of
from weft.grow.growth import deeper, old_names, wider
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.optim.groups import first_of

OLD = replace(SIZES["llama3.2-1b"], num_layers=4, d_model=64, d_ff=96, vocab_size=300)
GROUPS: list[list[dict[str, Any]]] = [
    [{"params": "layers.2.*", "trainable": False}],
    [{"params": "layers.[13].attn*", "lr_scale": 0.1}, {"params": "layers.3.*", "lr_scale": 2.0}],
    [
        {"params": "*.1.*", "lr_scale": 0.5, "narrower_than": 80},
        {"params": "emb*", "lr_scale": 3},
    ],
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("way", ["stack", "interpolate", "identity"])
def test_each_layer_is_in_the_group_of_what_it_copies(
    groups: list[dict[str, Any]], way: Any
) -> None:
    growth = deeper(OLD, 7, way)
    before, after = (
        [ParamGroupConfig.model_validate(each) for each in some]
        for some in (groups, groups_of(groups, growth))
    )
    old = {param.name: param for param in param_specs(OLD)}
    moved = 0
    for param in param_specs(growth.new):
        mine, its = first_of(after, param), first_of(before, old[old_names(param, growth)[0]])
        assert (mine is None) == (its is None), param.name
        if mine and its:
            assert (mine.lr_scale, mine.trainable) == (its.lr_scale, its.trainable), param.name
        moved += first_of(before, param) != its
    assert moved, "with the old patterns other layers would be in them"


def test_what_says_the_same_stays_as_it_was_written() -> None:
    everywhere = [
        {"params": "layers.*.attn*", "lr_scale": 0.1},
        {"params": "*norm*", "fp8": True},
    ]
    assert groups_of(everywhere, deeper(OLD, 7, "stack")) == everywhere
    assert groups_of(GROUPS[0], wider(OLD, {"d_ff": 128})) == GROUPS[0]


def test_whole_layers_are_one_pattern_each() -> None:
    found = groups_of(GROUPS[0], deeper(OLD, 8, "stack"))
    assert found == [{"params": f"layers.{n}.*", "trainable": False} for n in (2, 6)]
