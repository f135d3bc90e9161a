"""What a run may begin with: all that fits, and of the rest what is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.checkpoint_cases import save, values
from torch import Tensor

from weft.config.errors import ConfigErrors
from weft.config.sections import CheckpointConfig
from weft.models.llama.sizes import SIZES
from weft.models.registry import FAMILIES
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.train.loading import loading

SPEC = SIZES["debug-1m"].reduced()
ONE = FAMILIES[SPEC.family].param_specs(SPEC)[0]


def params(**shapes: tuple[int, ...]) -> list[ParamSpec]:
    return [
        replace(ONE, name=name.replace("_", "."), shape=shape) for name, shape in shapes.items()
    ]


def start(out: Tensor, spec: ParamSpec, box: Box) -> None:
    out.fill_(-1.0)


def test_only_what_is_named_may_differ(tmp_path: Path) -> None:
    """Stored: embed.weight (6, 8) and norm.weight (8,)."""
    save(tmp_path / "checkpoints", 3, seed=3)
    wanted = params(embed_weight=(9, 8), head_weight=(4,))
    load = str(tmp_path)
    with pytest.raises(ConfigErrors) as error:
        loading(CheckpointConfig(load=load), wanted)
    folder = tmp_path / "checkpoints/step-00000003"
    assert [str(each) for each in error.value.errors] == [
        "checkpoint.allow_missing = []: expected a pattern for head.weight. "
        f"head.weight (4,) is not stored in {folder}.",
        "checkpoint.allow_resized = []: expected a pattern for embed.weight. "
        f"embed.weight (9, 8) is stored as (6, 8) in {folder}.",
        "checkpoint.allow_unused = []: expected a pattern for norm.weight. "
        f"The model has no norm.weight (8,) of {folder}.",
    ]
    config = CheckpointConfig(
        load=load, allow_missing=("head.*",), allow_resized=("embed.*",), allow_unused=("norm.*",)
    )
    found = loading(config, wanted)
    assert found is not None
    assert found.report() == [
        f"loaded 0 parameters of {folder}, step 3",
        "resized embed.weight: stored (6, 8), the model has (9, 8)",
        "not stored, with initial values: head.weight",
        "stored and not used: norm.weight",
    ]
    write = found.values(start)
    rows, beyond, head = torch.empty(5, 4), torch.empty(2, 8), torch.empty(4)
    write(rows, wanted[0], Box((3, 2), (5, 4)))
    write(beyond, wanted[0], Box((7, 0), (2, 8)))
    write(head, wanted[1], Box((0,), (4,)))
    assert torch.equal(rows[:3], values(3)["param", "embed.weight"][3:, 2:6])
    assert all(bool((each == -1).all()) for each in (rows[3:], beyond, head))


def test_leave_that_nothing_needs(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 3, seed=3)
    wanted = params(embed_weight=(6, 8), norm_weight=(8,))
    found = loading(CheckpointConfig(load=str(tmp_path)), wanted)
    assert found is not None
    assert found.loaded == ("embed.weight", "norm.weight")
    with pytest.raises(ConfigErrors, match=r"'head\.\*' would have no effect"):
        loading(CheckpointConfig(load=str(tmp_path), allow_missing=("head.*",)), wanted)
    with pytest.raises(ValueError, match=r"expected \[\] without checkpoint.load"):
        CheckpointConfig(allow_missing=("head.*",))
    with pytest.raises(ConfigErrors, match="with 1 dimensions"):
        loading(CheckpointConfig(load=str(tmp_path)), params(embed_weight=(6,), norm_weight=(8,)))
