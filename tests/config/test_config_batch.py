"""The batch arithmetic: two are given, the third is derived and said."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.batch import Batch, derive_batch
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.sections import BatchConfig

_SMALL = st.integers(1, 50)


def test_notes() -> None:
    """Hand-counted: 24 samples over shares 2:1 are 4 micro-batches of 2 for a share of 1."""
    assert derive_batch(BatchConfig(samples=24, micro=2), (2, 1)) == Batch(
        samples=24,
        micro=2,
        accumulation=4,
        note="batch.accumulation = 4, derived from samples 24 / (micro 2 x shares 3)",
    )
    assert derive_batch(BatchConfig(samples=24, accumulation=4), (2, 1)) == Batch(
        samples=24,
        micro=2,
        accumulation=4,
        note="batch.micro = 2, derived from samples 24 / (accumulation 4 x shares 3)",
    )
    assert derive_batch(BatchConfig(micro=2, accumulation=4), (2, 1)) == Batch(
        samples=24,
        micro=2,
        accumulation=4,
        note="batch.samples = 24, derived from micro 2 x accumulation 4 x shares 3",
    )


def test_one_pipeline_has_no_shares_to_speak_of() -> None:
    found = derive_batch(BatchConfig(samples=24, micro=2), (1,))
    assert found.note == "batch.accumulation = 12, derived from samples 24 / micro 2"
    with pytest.raises(ConfigError) as caught:
        derive_batch(BatchConfig(samples=25, micro=2), (1,))
    assert str(caught.value) == (
        "batch.samples = 25: expected a multiple of batch.micro (2). Try 24 or 26."
    )


def test_somebody_takes_samples() -> None:
    with pytest.raises(ConfigError) as caught:
        derive_batch(BatchConfig(samples=8, micro=2), (0, 0))
    assert str(caught.value) == (
        "plan.pipelines.share = [0, 0]: expected a number above 0 for some pipeline."
    )


@given(_SMALL, _SMALL, st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_two_give_the_third(micro: int, accumulation: int, shares: list[int]) -> None:
    whole = derive_batch(BatchConfig(micro=micro, accumulation=accumulation), shares)
    assert whole.samples == sum(micro * accumulation * share for share in shares)
    by_micro = derive_batch(BatchConfig(samples=whole.samples, micro=micro), shares)
    by_count = derive_batch(BatchConfig(samples=whole.samples, accumulation=accumulation), shares)
    assert by_micro.accumulation == accumulation
    assert by_count.micro == micro


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            BatchConfig(samples=5, micro=2),
            "batch.samples = 5: expected a multiple of batch.micro x the sum of the shares "
            "(2 x 3 = 6). Try 6.",
        ),
        (
            BatchConfig(samples=20, accumulation=2),
            "batch.samples = 20: expected a multiple of batch.accumulation x the sum of "
            "the shares (2 x 3 = 6). Try 18 or 24.",
        ),
        (
            BatchConfig(samples=24, micro=2, accumulation=4),
            "batch = {samples: 24, micro: 2, accumulation: 4}: expected two of samples, micro and "
            "accumulation. Set one of them to null.",
        ),
        (
            BatchConfig(),
            "batch = {}: expected two of samples, micro and accumulation. "
            "Give two, and the third follows.",
        ),
    ],
)
def test_refusals(batch: BatchConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        derive_batch(batch, (2, 1))
    assert str(caught.value) == message


def test_errors_survive_another_process() -> None:
    """A worker process may raise one: it must be possible to build it again from its parts."""
    error = ConfigError("data.path", "x", "a file", "Try y.", where="at my.yaml:3")
    both = copy.deepcopy(ConfigErrors([error]))
    assert str(both) == str(ConfigErrors([error]))
    assert both.errors[0].where == "at my.yaml:3"
    assert str(error) == "data.path = 'x': expected a file. Try y."


def test_long_values_are_cut() -> None:
    text = str(ConfigError("a", "x" * 1000, "less"))
    assert text == f"a = '{'x' * 149} ...: expected less."
