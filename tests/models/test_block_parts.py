"""Blocks of every model name the parts that ways to recompute wrap."""

import pytest

from weft.models.registry import FAMILIES, build_stage, shape_of
from weft.nn.shapes import only_shapes
from weft.nn.stage import parts_of
from weft.recompute.registry import MODES

SIZES = [(family, size) for family, known in FAMILIES.items() for size in known.sizes]


@pytest.mark.parametrize(("family", "size"), SIZES, ids=str)
def test_what_a_mode_wraps_is_there(family: str, size: str) -> None:
    spec = FAMILIES[family].sizes[size].reduced()
    experts = shape_of(spec).experts
    with only_shapes():
        blocks = [unit.block for unit in build_stage(spec).units.values() if unit.block]
    layers = [block for block in blocks if parts_of(block)]
    assert len(layers) == spec.num_layers
    for number, block in enumerate(layers):
        parts = {name: len(found) for name, found in parts_of(block).items()}
        has_experts = experts is not None and number >= experts.dense_layers
        for mode in MODES.values():
            if not mode.part or (mode.chunk_tokens and has_experts):
                continue
            both = experts is not None and has_experts and experts.shared_d_ff
            assert parts[mode.part] == 1 + bool(both and mode.name == "activation"), mode.name
