"""What outer gradients travel in: values back as they were, about, and nothing hidden."""

import pytest
import torch
from torch import Tensor

from weft.outer.wire import WIRES, by_rows, peaks, scales_of


def there_and_back(name: str, values: Tensor) -> Tensor:
    wire, size = WIRES[name], tuple(values.shape)
    scales = by_rows(scales_of(peaks(values)), size) if wire.has_scales else None
    return wire.decode(wire.encode(values, scales), scales, values.dtype)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize(("name", "error"), [("fp64", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127)])
def test_values_come_back(name: str, error: float, shape: tuple[int, ...]) -> None:
    """Off by at most a part of the largest of their row."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    back = there_and_back(name, values)
    assert back.shape == values.shape and back.dtype == values.dtype
    largest = by_rows(peaks(values), shape).to(values)
    assert bool(((back - values).abs() <= error * largest * (1 + 1e-6)).all())
    assert there_and_back(name, torch.zeros(shape)).equal(torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad: float) -> None:
    """Its row says so, and the others are as they were."""
    values = torch.ones(3, 4)
    values[1, 2] = bad
    back = there_and_back("int8", values)
    assert not back[1].isfinite().any()
    assert back[0].equal(values[0]) and back[2].equal(values[2])
