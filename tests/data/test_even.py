"""Samples given out by work: the same ones, each once, and nobody has much more than others."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from data_cases import write_store

from weft.config.errors import ConfigError
from weft.data.dataset import PackedSpec
from weft.data.even import (
    EvenSpec,
    following,
    given_out,
    imbalance,
    parts_of,
    refuse_cut_blocks_by_work,
    refuse_one_part,
    shared_out,
)
from weft.data.left_out import LeftOut, WithoutSpec
from weft.data.order import TrainOrder
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.shares import with_shares

SEQ_LEN = 64


def pipeline(*ranks: int, samples: int, microbatch: int) -> PipelinePlan:
    stage = StagePlan(mesh=Mesh.of(ranks, dp=len(ranks)), layers=(0, 2))
    return PipelinePlan(stages=(stage,), samples=samples, microbatch=microbatch)


PLAN = Plan(
    num_layers=2,
    pipelines=(
        pipeline(0, 1, samples=11, microbatch=4),
        pipeline(2, samples=6, microbatch=2),
        pipeline(3, samples=7, microbatch=7),
    ),
)
"""24 samples; ranks have 6, 5, 6 and 7 of them."""


@pytest.fixture
def packed(tmp_path: Path) -> PackedSpec:
    """Two stores, one of two shards: documents of 2 to 600 tokens, all with an end."""
    rng = np.random.default_rng(3)
    stores = []
    for number in range(2):
        shards = []
        for _ in range(2 - number):
            lengths = np.exp(rng.uniform(0.7, 6.4, 60)).astype(int)
            tokens = rng.integers(8, 99, lengths.sum())
            tokens[np.cumsum(lengths) - 1] = 7
            shards.append(tokens.tolist())
        stores.append(write_store(tmp_path / str(number), shards, end=7))
    order = TrainOrder(5, tuple(store.num_samples(SEQ_LEN) for store in stores), (1.0, 2.0))
    return PackedSpec(
        stores=tuple(stores), seq_len=SEQ_LEN, end_id=7, mask_documents=True, order=order
    )


def test_pairs_are_those_that_attention_has(packed: PackedSpec) -> None:
    dataset = packed.open()
    batch = dataset.batch(range(100))
    assert batch.segments is not None
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    assert dataset.pairs(range(100)).tolist() == np.tril(same).sum((1, 2)).tolist()


def test_everyone_has_as_many_samples_as_before_and_equal_work(packed: PackedSpec) -> None:
    spec = EvenSpec(spec=packed, parts=parts_of(PLAN), token=5)
    assert spec.global_batch == PLAN.global_batch
    even, plain = spec.open(), packed.open()
    found: list[float] = []
    for number in range(20):
        whole = plain.batch(range(24 * number, 24 * number + 24))
        parts = [
            even.batch([24 * number + place for part in mine.microbatches() for place in part])
            for mine in map(PLAN.rank_plan, range(4))
        ]
        rows = sorted(
            (int(part.samples[row]), part.tokens[row].tobytes())
            for part in parts
            for row in range(len(part.samples))
        )
        samples = map(int, whole.samples)
        assert rows == list(zip(samples, (row.tobytes() for row in whole.tokens), strict=True))
        assert sum(part.fingerprint() for part in parts) == whole.fingerprint()
        before, after = parts[3].evened if parts[3].evened is not None else (0.0, 0.0)
        a_sample = [even.work(number)[part.samples - 24 * number].mean() for part in parts]
        assert after == pytest.approx(max(a_sample) / even.work(number).mean())
        assert after < 1.05 and after < before
        found.append(after)
    assert np.mean(found) < 1.015


def test_batches_that_are_left_out_are_left_out(packed: PackedSpec) -> None:
    """And another plan changes who has what, of the same dataset."""
    even = EvenSpec(spec=packed, parts=parts_of(PLAN), token=5)
    without = WithoutSpec(even, LeftOut(((2, 3),)), 24)
    batch, expected = without.open().batch(range(48, 72)), even.open().batch(range(96, 120))
    assert batch.samples.tolist() == expected.samples.tolist() != [*range(96, 120)]
    other = following(without, with_shares(PLAN, (4, 8, 12)))
    assert isinstance(other, WithoutSpec) and isinstance(other.spec, EvenSpec)
    assert [sum(map(len, part)) for part in other.spec.parts[0]] == [2, 2, 8, 12]
    assert sorted(other.open().batch(range(48, 72)).samples) == [*range(96, 120)]


def test_ranks_have_work_by_their_samples_and_microbatches_likewise() -> None:
    work = np.random.default_rng(1).integers(100, 1000, 64)
    big, small = shared_out(work, [48, 16])
    assert (len(big), len(small)) == (48, 16)
    assert work[big].sum() == pytest.approx(3 * work[small].sum(), rel=0.01)
    parts = parts_of(Plan(num_layers=2, pipelines=(pipeline(0, 1, samples=64, microbatch=16),)))
    order = given_out(work, parts)
    of_parts = [work[order][list(each)].sum() for part in parts[0] for each in part]
    assert len(of_parts) == 8 and max(of_parts) < 1.03 * work.sum() / 8
    ends = [8, 3, 1, 12]
    assert [len(each) for each in shared_out(np.full(24, 7), ends)] == ends, "all alike"


def test_no_sample_leaves_its_site() -> None:
    work = np.arange(24) ** 2
    order = given_out(work, parts_of(replace(PLAN, sites=((0, 1), (2, 3)))))
    assert sorted(order[:11]) == [*range(11)] and sorted(order[11:]) == [*range(11, 24)]
    whole = given_out(work, parts_of(PLAN))
    assert sorted(whole) == [*range(24)] and sorted(whole[:11]) != [*range(11)]
    assert imbalance(work[whole], parts_of(PLAN)) < imbalance(work[order], parts_of(PLAN))


def test_the_stage_that_divides_samples_most_counts() -> None:
    stages = (
        StagePlan(mesh=Mesh.of((0, 1), tp=2), layers=(0, 1)),
        StagePlan(mesh=Mesh.of((2, 3), dp=2), layers=(1, 2)),
    )
    plan = Plan(num_layers=2, pipelines=(PipelinePlan(stages=stages, samples=6, microbatch=4),))
    assert parts_of(plan) == (((range(2), range(4, 5)), (range(2, 4), range(5, 6))),)
    places = chain.from_iterable(chain.from_iterable(parts_of(plan)[0]))
    assert sorted(places) == [*range(6)]


def test_blocks_of_tokens_are_those_of_one_process() -> None:
    stage = StagePlan(mesh=Mesh.of(range(2), cp=2), layers=(0, 2), precision="fp8-rowwise")
    line = PipelinePlan(stages=(stage,), samples=4, microbatch=2)
    plan = Plan(num_layers=2, pipelines=(line,))
    refuse_cut_blocks_by_work(plan, SEQ_LEN)
    plan = plan.each(lambda stage: replace(stage, precision="fp8-blockwise"))
    with pytest.raises(ConfigError, match=r"Other tokens would be in its blocks of 128"):
        refuse_cut_blocks_by_work(plan, SEQ_LEN)


def test_one_rank_has_nobody_to_give_to() -> None:
    """Nor from one of its micro-batches to another, for which nobody waits."""
    words = r"data.balance_documents = true: expected false. One"
    for many in (4, 2):
        with pytest.raises(ConfigError, match=words):
            refuse_one_part(
                Plan(num_layers=2, pipelines=(pipeline(0, samples=4, microbatch=many),)), SEQ_LEN
            )
