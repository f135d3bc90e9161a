"""A precision says for every role which dtype it has and where it is kept."""

from dataclasses import replace

import pytest
import torch

from weft.config.errors import ConfigError
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Role

WIDE = ("accumulation", "reduction", "master", "state")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("fp64", "float64", "float64"),
        ("fp32", "float32", "float32"),
        ("bf16", "bfloat16", "float32"),
    ],
)
def test_named_precisions(name: str, low: str, high: str) -> None:
    roles = PRECISIONS[name]
    assert roles.name == name
    assert roles.compute.dtype is vars(torch)[low]
    assert roles.master.dtype is vars(torch)[high]
    for role, stored in roles.by_role().items():
        assert stored == Role(high if role in WIDE else low), role
    assert roles.by_role().keys() == {"compute", "parameters", *WIDE}


def test_another_tier_is_refused_by_name() -> None:
    expected = r"precision.bf16.state.tier = 'tape': expected 'device' or 'host' or 'disk'"
    with pytest.raises(ConfigError, match=expected):
        replace(PRECISIONS["bf16"], state=Role("float32", tier="tape"))


def test_parameters_are_what_the_arithmetic_takes() -> None:
    with pytest.raises(ConfigError, match=r"precision.fp32.parameters = 'torch.bfloat16'"):
        replace(PRECISIONS["fp32"], parameters=Role("bfloat16"))


def test_what_only_updates_need_goes_to_a_tier() -> None:
    apart = PRECISIONS["bf16"].updating_in("disk", "/fast").by_role()
    moved = {name for name, role in apart.items() if (role.tier, role.folder) == ("disk", "/fast")}
    assert moved == {"master", "state"}
