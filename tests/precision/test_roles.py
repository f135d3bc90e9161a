"""A precision says for every role which dtype it has and where it is kept."""

from dataclasses import replace

import pytest
import torch

from weft.config.errors import ConfigError
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Role, Roles

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
    with pytest.raises(ConfigError, match=r"precision.bf16.state.tier = 'host': expected 'device'"):
        replace(PRECISIONS["bf16"], state=Role("float32", tier="host"))


def test_parameters_are_what_the_arithmetic_takes() -> None:
    with pytest.raises(ConfigError, match=r"precision.fp32.parameters = 'torch.bfloat16'"):
        replace(PRECISIONS["fp32"], parameters=Role("bfloat16"))


def test_a_role_names_the_device_it_is_kept_on() -> None:
    meta = torch.device("meta")
    assert Roles.of("x", 9, "float32", "float64").master.place(meta) == meta
