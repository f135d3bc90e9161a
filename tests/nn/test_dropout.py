"""Dropout depends on seed, step, sample, site, position and feature, and on nothing else."""

import pytest
import torch
from torch import Tensor

from weft.nn.dropout import Dropout, dropout_keys, element_bits

SAMPLES = torch.tensor([0, 7, 12_345_678_901])
POSITIONS = torch.arange(5)[None]
MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _sequence(x: int) -> int:
    return _mix((x + 0x9E3779B97F4A7C15) & MASK)


def _bits(seed: int, step: int, sample: int, site: int, position: int, feature: int) -> int:
    """One element in Python's unbounded integers."""
    key = _mix(_mix(sample) ^ _sequence(_sequence(seed) ^ step))
    token = _mix(_mix((key + _sequence(site)) & MASK) ^ position)
    low, high, word = token & 0xFFFFFFFF, token >> 32, (1 << 32) - 1
    x = ((feature * 0x9E3779B1) & word) ^ low
    x = (((x ^ (x >> 16)) * 0x85EBCA6B) + high) & word
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & word
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def test_bits_are_those_of_unbounded_integers() -> None:
    bits = element_bits(dropout_keys(2**63 + 5, 9, SAMPLES), 3, POSITIONS + 70_000, 20)
    assert bits.shape == (3, 5, 20) and bits.dtype == torch.int32
    for (i, p, f), value in {
        (i, p, f): bits[i, p, f].item() for i in range(3) for p in range(5) for f in range(20)
    }.items():
        assert value == _bits(2**63 + 5, 9, SAMPLES[i].item(), 3, 70_000 + p, f)


def _drop(
    samples: Tensor, positions: Tensor = POSITIONS, *, site: int = 1, step: int = 2
) -> Tensor:
    shape = (len(samples), positions.shape[1], 64)
    return Dropout(0.3, site)(torch.ones(shape), dropout_keys(1, step, samples), positions)


def test_a_sample_drops_the_same_wherever_it_is_computed() -> None:
    together = _drop(SAMPLES)
    assert torch.equal(together.flip(0), _drop(SAMPLES.flip(0)))
    assert torch.equal(together[1:2], _drop(SAMPLES[1:2]))
    assert torch.equal(together[:, 2:], _drop(SAMPLES, POSITIONS[:, 2:]))


def test_samples_sites_steps_positions_and_seeds_differ() -> None:
    x = _drop(SAMPLES)
    for other in (
        _drop(SAMPLES + 1),
        _drop(SAMPLES, site=2),
        _drop(SAMPLES, step=3),
        _drop(SAMPLES, POSITIONS + 1),
        x[:, [1, 2, 3, 4, 0]],
        x.roll(1, 2),
    ):
        agree = ((x == 0) == (other == 0)).float().mean().item()
        assert agree == pytest.approx(0.3**2 + 0.7**2, abs=0.06)  # 960 elements


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_scale_and_gradient(rate: float) -> None:
    x = torch.ones(16, 64, 256, dtype=torch.float64, requires_grad=True)
    keys = dropout_keys(3, 0, torch.arange(16))
    y = Dropout(rate, 0)(x, keys, torch.arange(64)[None])
    kept = y != 0
    sigma = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * sigma
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - rate)))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())  # y is x times the mask, and x is one


def test_nothing_is_dropped_without_keys_or_rate() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert Dropout(0.5, 0)(x, None, POSITIONS) is x
    assert Dropout(0.0, 0)(x, dropout_keys(1, 1, SAMPLES[:2]), POSITIONS) is x
