"""Parts of the head that the planner finds: where they pay, and no plan is slower for it."""

from dataclasses import replace

import pytest

from benchmarks.finer_borders import OPTIONS, cluster
from weft.models.llama.sizes import SIZES
from weft.planner.fit import shortages
from weft.planner.forecast import forecast
from weft.planner.heads import check_heads
from weft.planner.problem import Problem, Workload
from weft.planner.search import search
from weft.planner.validate import validate_plan


@pytest.mark.parametrize(
    ("vocab_size", "speeds", "gain"),
    [
        (32_000, (1.0, 1.0, 1.0), 1.0),
        (128_256, (1.0, 0.9, 0.8), 1.05),
        (32_000, (1.0, 0.5), 1.0),
    ],
)
def test_parts_of_the_head_save_time(
    vocab_size: int, speeds: tuple[float, ...], gain: float
) -> None:
    spec = replace(SIZES["llama2-7b"], num_layers=4, vocab_size=vocab_size)
    workload = Workload(spec=spec, seq_len=4096, samples=32)
    options = replace(OPTIONS, cuts_layers=True)
    whole, divided = (
        search(Problem(workload, cluster(speeds), options=replace(options, divides_heads=on))).best
        for on in (False, True)
    )
    asked = Problem(workload, cluster(speeds), options=options).on(divided.cluster)
    assert divided.time.step_s <= whole.time.step_s / gain
    assert bool(divided.plan.pipelines[0].heads) == (gain > 1)
    assert not shortages(divided.plan, asked)
    assert forecast(divided.plan, asked).step_s == divided.time.step_s
    check_heads(divided.plan, vocab_size)
    validate_plan(
        divided.plan,
        num_layers=4,
        global_batch=32,
        parts=("attention", "feed-forward"),
        head_rows=vocab_size,
    )
