"""Loader processes: the same batches whatever their number, and never a wait without end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
from data_cases import write_store

from weft.data.batch import Batch, DatasetSpec, Positions
from weft.data.dataset import PackedSpec
from weft.data.loader import Loader, LoaderError
from weft.data.order import TrainOrder
from weft.data.synthetic import SyntheticDataset

CONTEXT = multiprocessing.get_context("forkserver")
OFFSETS = [3, 4, 5, 9]


def loader(spec: DatasetSpec, **changes: object) -> Loader:
    values = {"global_batch": 12, "offsets": OFFSETS, "context": CONTEXT, "last_step": 11}
    return Loader(spec, **{**values, **changes})


def same(a: Batch, b: Batch) -> bool:
    return all(
        np.array_equal(x, y) and x.dtype == y.dtype if x is not None else y is None
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.fixture
def packed(tmp_path: Path) -> PackedSpec:
    tokens = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    store = write_store(tmp_path, [tokens[:1700], tokens[1700:]])
    order = TrainOrder(5, (store.num_samples(16),), (1.0,))
    return PackedSpec(stores=(store,), seq_len=16, end_id=7, mask_documents=True, order=order)


@pytest.mark.parametrize("kind", ["packed", "packed without segments", "synthetic"])
def test_the_number_of_workers_changes_nothing(packed: PackedSpec, kind: str) -> None:
    spec: DatasetSpec = packed
    if kind != "packed":
        spec = replace(packed, mask_documents=False)
    if kind == "synthetic":
        spec = SyntheticDataset(100, 16, 7)
    expected = [
        spec.open().batch([step * 12 + offset for offset in OFFSETS]) for step in range(4, 11)
    ]
    for workers in (0, 1, 3):
        with loader(spec, workers=workers, first_step=4, prefetch=2) as batches:
            found = list(batches)
        assert len(found) == 7
        assert all(map(same, found, expected)), workers


def test_no_last_step_no_end() -> None:
    with loader(SyntheticDataset(9, 4, 1), workers=2, last_step=None, prefetch=1) as batches:
        steps = [int(batch.samples[0]) for batch in islice(batches, 40)]
    assert steps == [12 * step + 3 for step in range(40)]


def test_a_rank_without_samples_gets_empty_batches(packed: PackedSpec) -> None:
    for workers in (0, 1):
        with loader(packed, workers=workers, offsets=[], last_step=2) as batches:
            assert [batch.tokens.shape for batch in batches] == [(0, 16), (0, 16)]


def test_more_workers_than_steps() -> None:
    with loader(SyntheticDataset(9, 4, 1), workers=3, last_step=1) as batches:
        assert len(list(batches)) == 1


@dataclass(frozen=True)
class Scripted:
    """Leaves a file for every batch made, waits for files where told, and fails where told.

    Its batches have the position as the only token.
    """

    folder: str
    wait: tuple[tuple[int, int], ...] = ()
    """(position, the position that must have been made before it)."""
    fail: int = -1
    opens: bool = True

    def open(self) -> "Scripted":
        if not self.opens:
            raise OSError("the disk is gone")
        return self

    def batch(self, positions: Positions) -> Batch:
        (position,) = np.asarray(positions).tolist()
        for other in (other for waiting, other in self.wait if waiting == position):
            _until((Path(self.folder) / str(other)).exists, timeout_s=FOREVER_S)
        if position == self.fail:
            raise ZeroDivisionError(f"sample {position} is odd")
        (Path(self.folder) / str(position)).touch()
        tokens = np.full((1, 1), position, np.int32)
        return Batch(tokens, tokens, np.ones((1, 1), np.float32), None, np.array([position]))


def _until(condition: object, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


FOREVER_S = 3600.0
"""Longer than a test may take: whoever waits for this hangs."""
ONE = {"global_batch": 1, "offsets": [0], "last_step": None}


def test_a_slow_worker_does_not_change_the_order(tmp_path: Path) -> None:
    """Worker 0 makes step 0 only after worker 1 has made steps 1, 3 and 5."""
    spec = Scripted(str(tmp_path), wait=((0, 5),))
    with loader(spec, workers=2, prefetch=3, **ONE) as batches:
        assert [int(b.samples[0]) for b in islice(batches, 8)] == list(range(8))


def test_workers_stay_as_far_ahead_as_their_credit(tmp_path: Path) -> None:
    def made() -> int:
        return len(list(tmp_path.iterdir()))

    with loader(Scripted(str(tmp_path)), workers=2, prefetch=3, **ONE) as batches:
        for taken in range(6):
            _until(lambda taken=taken: made() == taken + 6)
            time.sleep(0.05)  # Time to go too far, if they would.
            assert made() == taken + 6
            next(batches)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_in_its_turn_with_its_traceback(tmp_path: Path, workers: int) -> None:
    spec = Scripted(str(tmp_path), fail=3)
    with loader(spec, workers=workers, **ONE) as batches:
        assert [int(batch.samples[0]) for batch in islice(batches, 3)] == [0, 1, 2]
        with pytest.raises(LoaderError) as caught:
            next(batches)
    error = caught.value
    assert (error.worker, error.step) == (3 % workers, 3)
    assert "ZeroDivisionError: sample 3 is odd" in error.detail
    assert "test_loader.py" in error.detail
    assert str(error).startswith(f"loader worker {3 % workers}, at the batch of step 3: Traceback")


def test_a_dataset_that_does_not_open_is_an_error(tmp_path: Path) -> None:
    batches = loader(Scripted(str(tmp_path), opens=False), **ONE)
    with batches, pytest.raises(LoaderError, match="the disk is gone"):
        next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        loader(Scripted(str(tmp_path), opens=False), workers=0, **ONE)


def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    """Killed while it makes a batch that will never come."""
    spec = Scripted(str(tmp_path), wait=((5, 999),))
    with loader(spec, workers=2, prefetch=1, **ONE) as batches:
        assert [int(batch.samples[0]) for batch in islice(batches, 5)] == list(range(5))
        os.kill(batches.pids[1], signal.SIGKILL)
        with pytest.raises(LoaderError) as caught:
            next(batches)
    assert str(caught.value) == (
        f"loader worker 1, at the batch of step 5: process {_pid_in(caught.value)} was ended by "
        "SIGKILL (out of memory?)"
    )
    assert caught.value.is_loss


def _pid_in(error: LoaderError) -> str:
    return error.detail.split()[1]


def test_what_a_killed_worker_had_sent_still_comes(tmp_path: Path) -> None:
    with loader(Scripted(str(tmp_path)), workers=1, prefetch=2, **ONE) as batches:
        next(batches)
        _until((tmp_path / "2").exists)
        _until(batches._workers[0].inbox.poll)
        os.kill(batches.pids[0], signal.SIGKILL)
        assert int(next(batches).samples[0]) == 1
        with pytest.raises(LoaderError, match="at the batch of step"):
            list(islice(batches, 3))


def test_close_ends_the_processes_even_busy_ones(tmp_path: Path) -> None:
    batches = loader(Scripted(str(tmp_path), wait=((1, 999),)), workers=2, **ONE)
    next(batches)
    processes = [psutil.Process(pid) for pid in batches.pids]
    batches.close()
    assert not any(map(_runs, processes))
    batches.close()
    with pytest.raises(AssertionError, match="closed"):
        next(batches)


def _runs(process: psutil.Process) -> bool:
    """A zombie has ended; in a container nobody may be there to bury it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_interrupts_from_the_terminal_are_left_to_the_parent() -> None:
    with loader(SyntheticDataset(9, 4, 1), workers=1, last_step=None) as batches:
        next(batches)
        os.kill(batches.pids[0], signal.SIGINT)
        assert [int(batch.samples[0]) for batch in islice(batches, 6)] == [15, 27, 39, 51, 63, 75]


PARENT = """
import multiprocessing, pathlib, sys, time
with open(sys.argv[1], "a") as file:
    file.write("main\\n")
from weft.data.loader import Loader
from weft.data.synthetic import SyntheticDataset
context = multiprocessing.get_context(sys.argv[2])
spec = SyntheticDataset(1000, int(sys.argv[3]), 0)
batches = Loader(spec, global_batch=8, offsets=range(8), context=context, workers=2)
next(batches), next(batches)
print(*batches.pids, flush=True)
time.sleep(3600)
"""
"""Without a guard around its main part: an import of it in a worker would start workers again."""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("seq_len", [4, 100_000], ids=["waiting for credit", "writing"])
def test_workers_end_with_a_parent_that_is_killed_and_never_ran_its_script(
    tmp_path: Path, method: str, seq_len: int
) -> None:
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(mark), method, str(seq_len)], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(_runs, workers))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _until(lambda: not any(map(_runs, workers)))
    assert mark.read_text() == "main\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_stopped_workers_end_with_a_parent_that_is_killed_and_its_output_ends(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "mark"), method, "4"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    try:
        for worker in workers:
            worker.suspend()
        parent.kill()
        parent.wait()
        _until(lambda: not any(map(_runs, workers)), timeout_s=60)
        assert parent.stdout.read() == b""
    finally:
        for worker in filter(_runs, workers):
            worker.kill()
        parent.stdout.close()


def test_close_ends_a_stopped_worker() -> None:
    batches = loader(SyntheticDataset(9, 4, 1), workers=2, last_step=None)
    next(batches)
    processes = [psutil.Process(pid) for pid in batches.pids]
    processes[0].suspend()
    batches.close()
    assert not any(map(_runs, processes))


def test_plain_fork_is_refused() -> None:
    with pytest.raises(AssertionError, match="spawn or forkserver"):
        loader(SyntheticDataset(9, 4, 1), context=multiprocessing.get_context("fork"))


def test_the_main_module_is_back_after_a_start() -> None:
    main = sys.modules["__main__"]
    with loader(SyntheticDataset(9, 4, 1)):
        assert sys.modules["__main__"] is main
