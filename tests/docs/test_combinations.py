"""Every plan that the manual calls refused is refused, with the key that it names."""

import pytest

from docs.combinations import BASE, REFUSALS, Refusal, resolved
from weft.config.errors import ConfigErrors


def test_the_base_of_the_table_works() -> None:
    assert resolved([]).plan.world_size == 2
    assert resolved(["plan.stages=[{}, {}]", "plan.schedule=zb-v"]).plan.global_batch == 24
    assert "batch.samples=24" in BASE


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.text)
def test_refused_by_the_key_that_is_named(refusal: Refusal) -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolved(refusal.asks, refusal.world_size)
    (error,) = caught.value.errors
    assert error.key == refusal.key
    assert error.expected
