"""Tokens of a sample given out by the work of its documents."""

import numpy as np
import pytest

from weft.axes.cp.axis import ContextParallel
from weft.data.inside import Slots, lengths_of, places_by_work, shares, slots_of
from weft.plan.layout import Dim
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

SEQ = 4096


def slots(ways: int, seq: int = SEQ) -> Slots:
    return tuple(ContextParallel().part(Dim(name="seq", size=seq), ways, n) for n in range(ways))


def drawn(seed: int) -> list[int]:
    """Lengths as of text: many short documents and few long ones, the last one cut."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < SEQ:
        lengths.append(min(int(np.exp(rng.normal(5.5, 1.3))) + 1, SEQ - sum(lengths)))
    return lengths


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_ranks_have_as_many_tokens_and_equal_work(ways: int) -> None:
    """Counted pair by pair, of attention alone."""
    before = []
    for seed in range(12):
        lengths = drawn(seed)
        places = places_by_work(lengths, slots(ways))
        assert sorted(places) == [*range(SEQ)]
        first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        seen = np.arange(SEQ) - first + 1
        for order in (np.arange(SEQ), places):
            loads = [sum(seen[order[p.start : p.stop]].sum() for p in own) for own in slots(ways)]
            assert shares(lengths, slots(ways), 0, order).tolist() == loads
            before.append(max(loads) / np.mean(loads))
        assert before.pop() < 1.03
        own = np.concatenate([places[p.start : p.stop] for p in slots(ways)[0]])
        assert (np.diff(own) > 0).all()
    assert np.mean(before) > 1.1, "there was nothing to gain"


def test_one_document_is_cut_as_always_and_short_ones_stay_whole() -> None:
    assert places_by_work([SEQ], slots(4)).tolist() == [*range(SEQ)]
    places = places_by_work([4] * (SEQ // 4), slots(4))
    at = np.argsort(places)  # the slot of each token
    rank_of = np.empty(SEQ, int)
    for rank, own in enumerate(slots(4)):
        for part in own:
            rank_of[part.start : part.stop] = rank
    together = rank_of[at].reshape(-1, 4)
    assert (together == together[:, :1]).all()


def test_lengths_are_those_of_runs_of_numbers() -> None:
    assert lengths_of(np.array([0, 0, 1, 2, 2, 2, 0])).tolist() == [2, 1, 3, 1]


def test_the_stage_that_divides_most_counts() -> None:
    stages = (
        StagePlan(mesh=Mesh.of((0, 1), cp=2), layers=(0, 1)),
        StagePlan(mesh=Mesh.of(range(2, 10), dp=2, cp=4), layers=(1, 2), device="cuda"),
    )
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=2)
    assert slots_of(Plan(num_layers=2, pipelines=(pipeline,)), SEQ) == slots(4)
