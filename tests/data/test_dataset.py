"""Samples cut from stores, by hand counts; and synthetic samples."""

from pathlib import Path

import numpy as np
import pytest
from data_cases import write_store

from weft.data.batch import Batch, spread
from weft.data.dataset import PackedSpec, StoreSpec
from weft.data.order import TrainOrder
from weft.data.pieces import TokenFileError
from weft.data.synthetic import SyntheticDataset

END = 9
STREAM = [1, 2, 3, END, 4, END, 5, 6, 7, END, END, 1]


def spec(store: StoreSpec, *, masked: bool = False, order: TrainOrder | None = None) -> PackedSpec:
    return PackedSpec(stores=(store,), seq_len=4, end_id=END, mask_documents=masked, order=order)


def test_samples_follow_each_other_and_share_their_border(tmp_path: Path) -> None:
    data = spec(write_store(tmp_path, [STREAM])).open()
    batch = data.batch([0, 1])
    assert data.num_samples == 2  # 12 tokens: the third window would need a 13th
    assert batch.tokens.tolist() == [[1, 2, 3, 9], [4, 9, 5, 6]]
    assert batch.targets.tolist() == [[2, 3, 9, 4], [9, 5, 6, 7]]
    assert batch.weights.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.segments is None
    assert batch.samples.tolist() == [0, 1]
    assert [batch.tokens.dtype, batch.targets.dtype] == [np.int32, np.int32]
    assert [batch.weights.dtype, batch.samples.dtype] == [np.float32, np.int64]


def test_masked_documents_are_numbered_and_not_predicted_across(tmp_path: Path) -> None:
    batch = spec(write_store(tmp_path, [STREAM]), masked=True).open().batch([1, 0])
    assert batch.tokens.tolist() == [[4, 9, 5, 6], [1, 2, 3, 9]]
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    # The end token is predicted; what follows it is not.
    assert batch.weights.tolist() == [[1, 0, 1, 1], [1, 1, 1, 0]]


def test_every_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    store = write_store(tmp_path, [list(range(10)), list(range(10, 11)), list(range(11, 41))])
    batch = spec(store).open().batch(range(10))
    assert sorted(batch.targets.ravel().tolist()) == list(range(1, 41))


def test_a_store_one_token_short_has_one_sample_less(tmp_path: Path) -> None:
    assert spec(write_store(tmp_path, [list(range(9))])).num_samples == 2
    assert spec(write_store(tmp_path, [list(range(8))])).num_samples == 1
    assert spec(write_store(tmp_path, [list(range(4))])).num_samples == 0


def test_train_positions_never_end_and_batches_do_not_depend_on_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stores = (
        write_store(tmp_path / "a", [list(range(100)), list(range(100, 203))]),
        write_store(tmp_path / "b", [list(range(1000, 1050))]),
    )
    order = TrainOrder(3, tuple(store.num_samples(4) for store in stores), (1.0, 1.0))
    packed = PackedSpec(stores=stores, seq_len=4, end_id=END, mask_documents=False, order=order)
    whole = packed.open().batch(range(500))
    assert (whole.targets == whole.tokens + 1).all()
    other = packed.open()
    for positions in ([7], [499, 0, 7, 7], []):
        part = other.batch(positions)
        assert np.array_equal(part.tokens, whole.tokens[positions])
        assert part.tokens.shape == (len(positions), 4)
    starts = {row[0] for row in whole.tokens[: packed.num_samples].tolist()}
    assert {start for start in starts if start >= 1000} == set(range(1000, 1048, 4))


def test_held_out_samples_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="position 2 of 2 held-out samples"):
        spec(write_store(tmp_path, [STREAM])).open().batch([2])


def test_held_out_samples_of_several_stores_follow_each_other(tmp_path: Path) -> None:
    empty = StoreSpec(folder=str(tmp_path), shards=(), crc32=(), type_code=8)
    (tmp_path / "b").mkdir()
    stores = (write_store(tmp_path, [STREAM]), empty, write_store(tmp_path / "b", [[7] * 5]))
    packed = PackedSpec(stores=stores, seq_len=4, end_id=END, mask_documents=False, order=None)
    assert packed.num_samples == packed.open().num_samples == 3
    assert packed.open().batch(range(3)).tokens[:, 0].tolist() == [1, 4, 7]


def test_a_lost_shard_is_named_when_opening(tmp_path: Path) -> None:
    found = spec(write_store(tmp_path, [STREAM, STREAM]))
    (tmp_path / "s1.bin").unlink()
    with pytest.raises(TokenFileError, match=r"s1\.bin: no such file"):
        found.open()


def test_batches_own_their_memory(tmp_path: Path) -> None:
    """PyTorch warns when it is given memory that it must not write to."""
    batch = spec(write_store(tmp_path, [STREAM]), masked=True).open().batch([0, 1])
    for found in (batch, Batch.from_bytes(batch.to_bytes())):
        for array in (found.tokens, found.targets, found.weights, found.segments, found.samples):
            assert array is not None and array.flags.writeable and array.flags.c_contiguous


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6]),
        (9, [0, 1, 2, 3, 4, 5, 6]),
        (3, [0, 2, 4]),
        (1, [0]),
        (0, []),
    ],
)
def test_a_limited_evaluation_sees_a_little_of_everything(
    limit: int | None, expected: list[int]
) -> None:
    assert spread(7, limit).tolist() == expected


def test_synthetic_samples_are_a_function_of_seed_and_position() -> None:
    data = SyntheticDataset(50, 12, 3)
    whole = data.batch(range(300))
    picked = [299, 4, 4, 0]
    part = data.batch(picked)
    for name in ("tokens", "targets", "weights", "segments"):
        assert np.array_equal(vars(part)[name], vars(whole)[name][picked])
    assert (whole.tokens[:, 1:] == whole.targets[:, :-1]).all()
    assert not np.array_equal(SyntheticDataset(50, 12, 4).batch(range(300)).tokens, whole.tokens)


def test_synthetic_samples_have_all_that_real_ones_may_have() -> None:
    batch = SyntheticDataset(50, 64, 0).batch(range(2000))
    assert set(np.unique(batch.tokens)) == set(range(50))
    assert abs((batch.weights == 0).mean() - 0.3) < 0.02
    empty = (batch.weights == 0).all(axis=1).mean()
    assert 0.07 < empty < 0.13
    assert batch.weights.max() < 2 and batch.weights.min() >= 0
    positive = batch.weights[batch.weights > 0]
    assert abs(positive.mean() - 1) < 0.02
    assert batch.segments is not None and (batch.segments[:, 0] == 0).all()
    steps = np.diff(batch.segments, axis=1)
    assert set(np.unique(steps)) == {0, 1} and abs(steps.mean() - 1 / 16) < 0.005
