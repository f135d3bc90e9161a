"""A rank that fails brings the job down within seconds, and its own error comes first."""

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from limits import within_some_limit

from weft.cli.main import main
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.errors import CommError
from weft.comm.join import join
from weft.comm.members import Channel
from weft.config.errors import ConfigError, RunError
from weft.elastic.crew import Crew
from weft.elastic.failure import Epoch, Failure, RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.elastic.process import LocalProcess
from weft.elastic.processes import COMPILER, PRELOADED, preloaded, run_ranks, warm_context
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.platform.threads import SPINS
from weft.train.stop import own_stop

FOREVER_S = 3600.0
"""Longer than a test may take: whoever waits for this hangs."""


def meet(address: RankAddress) -> Comm:
    torch.set_num_threads(1)
    return join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)


def test_ranks_that_recompute_fork_with_the_compiler() -> None:
    """Each would import it by itself."""
    stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, 1))
    plan = Plan(num_layers=1, pipelines=(PipelinePlan(stages=(stage,), samples=1, microbatch=1),))
    assert preloaded(plan) == PRELOADED
    some = plan.each(lambda stage: replace(stage, recompute="core+full:1"))
    assert preloaded(some) == (*PRELOADED, COMPILER)


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nobody says how threads wait."""
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(each, "")  # is undone
        monkeypatch.delenv(each)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("GOMP_SPINCOUNT", None, SPINS),
        ("GOMP_SPINCOUNT", "7", "7"),
        ("OMP_WAIT_POLICY", "active", None),
    ],
)
def test_threads_give_up_their_core_soon_unless_told_otherwise(
    name: str, said: str | None, expected: str | None, unsaid: pytest.MonkeyPatch
) -> None:
    if said is not None:
        unsaid.setenv(name, said)
    warm_context()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_commands_that_compute_themselves_do_so_too(unsaid: pytest.MonkeyPatch) -> None:
    unsaid.setattr(warnings, "formatwarning", warnings.formatwarning)
    unsaid.setattr("sys.argv", ["weft", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["GOMP_SPINCOUNT"] == SPINS


def works(address: RankAddress, out: Path) -> None:
    total = torch.tensor(float(address.rank + 1))
    meet(address).all_reduce(total, name="sum")
    print(f"rank {address.rank} saw {total.item()}")  # noqa: T201
    (out / f"{address.rank}.txt").write_text(str(total.item()))


def fails(address: RankAddress, how: str) -> None:
    """Rank 1 fails while the others wait for it."""
    comm = meet(address)
    comm.barrier(name="all here")
    if address.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "config":
            raise ConfigError("some.key", 3, "a number below 3")
        if how == "exit":
            os._exit(7)
        raise ValueError("the matrix is upside down")
    comm.all_reduce(torch.zeros(3), name="gradients")
    time.sleep(FOREVER_S)


def test_a_server_that_is_gone_before_ranks_are_forked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs up on whoever asks it for a process."""

    def hangs_up(*_: object) -> None:
        raise EOFError

    monkeypatch.setattr(ForkServerProcess, "start", hangs_up)
    with pytest.raises(RunError, match="ranks are forked from was ended from outside"):
        LocalProcess(meet, tmp_path, get_context("forkserver"))


def test_ranks_meet_and_all_but_the_first_log_to_files(tmp_path: Path) -> None:
    run_ranks(works, (tmp_path,), 3, folder=tmp_path)
    assert [(tmp_path / f"{r}.txt").read_text() for r in range(3)] == ["6.0"] * 3
    assert (tmp_path / "logs/rank2.log").read_text() == "rank 2 saw 6.0\n"
    assert not list(tmp_path.glob(".*")), "meeting files left behind"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others say what they saw however busy the machine is."""
    monkeypatch.setattr("weft.elastic.crew.GRACE_S", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        ("kill", "signal", "rank 1: was ended by SIGKILL from outside"),
        ("error", "error", "rank 1: ValueError: the matrix is upside down"),
        ("config", "config", "rank 1: some.key = 3: expected a number below 3."),
        ("exit", "signal", "rank 1: ended with exit code 7 and said nothing"),
    ],
)
def test_the_first_failure_is_named(tmp_path: Path, how: str, cause: str, message: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(fails, (how,), 3, folder=tmp_path)
    assert str(failed.value) == message
    assert failed.value.first.cause == cause
    assert ("upside down" in failed.value.first.detail) == (how == "error")
    peers = [f for f in failed.value.failures if f.cause == "peer"]
    assert {f.rank for f in peers} <= {0, 2}
    assert any("gradients with rank(s)" in f.message for f in peers), peers


def fails_without_a_folder(address: RankAddress) -> None:
    assert address.store_file is not None
    shutil.rmtree(address.store_file.parent)
    raise ValueError("the matrix is upside down")


def test_a_rank_that_can_leave_no_report_says_so(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(fails_without_a_folder, (), 1, folder=tmp_path / "run")
    assert str(failed.value) == (
        "rank 0: could leave no report in the run folder; it is printed above"
    )
    assert failed.value.first.cause == "machine"


def fails_in_a_phase(address: RankAddress, how: str) -> None:
    assert address.phase_file is not None
    address.phase_file.write_text("restore" if address.rank else "build")
    other_is_there = address.phase_file.parent / "rank 0 is in its phase"
    if address.rank == 0:
        other_is_there.touch()
    else:
        deadline = time.monotonic() + 600
        while not other_is_there.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RunError("the disk is upside down")
    time.sleep(FOREVER_S)


@pytest.mark.parametrize(("how", "cause"), [("kill", "signal"), ("error", "machine")])
def test_a_failure_says_in_which_phase(tmp_path: Path, how: str, cause: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(fails_in_a_phase, (how,), 2, folder=tmp_path)
    assert {f.rank: (f.phase, f.cause) for f in failed.value.failures} == {
        1: ("restore", cause),
        0: ("build", "peer"),
    }
    assert not list(tmp_path.glob(".*")), "phases left behind"


def stands_still(address: RankAddress, told: Path, how: str, *, abort: Abort | None = None) -> None:
    """Rank 1 is lost in the first epoch, or fails; rank 0 sleeps until the epoch is ended."""
    assert abort is not None
    if how == "done":
        return
    if address.rank == 0:
        asked = threading.Event()
        abort.then(asked.set)
        (told / "asleep").touch()
        asked.wait(FOREVER_S)
        raise CommError("the others are gone")
    while not (told / "asleep").exists():
        time.sleep(0.01)
    if how == "fails":
        raise ValueError("the matrix is upside down")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


@pytest.mark.parametrize("how", ["kill", "stop", "fails"])
def test_others_come_to_the_door_when_a_rank_was_lost(tmp_path: Path, how: str) -> None:
    """Nobody waits for the stopped one: that it does not answer is noticed by the launcher. After
    an error of a rank itself nobody is asked whether the job goes on."""
    within_some_limit(partial(is_lost, tmp_path, how), 2.0)


def is_lost(tmp_path: Path, how: str, limit_s: float) -> None:
    asked: list[dict[int, str]] = []
    (tmp_path / "asleep").unlink(missing_ok=True)
    run = partial(run_ranks, stands_still, (tmp_path, how), 2, folder=tmp_path)

    def recover(failures: Sequence[Failure]) -> Epoch:
        asked.append({f.rank: f.message for f in failures})
        return Epoch((tmp_path, "done"), 2)

    if how == "fails":
        with pytest.raises(RanksFailedError, match="rank 1: ValueError: the matrix is upside down"):
            run(recover=recover)
        assert not asked
        return
    run(recover=recover, heartbeat_s=limit_s)
    lost = "was ended by SIGKILL from outside"
    if how == "stop":
        lost = f"did not answer for {limit_s:g} s (recovery.heartbeat_s) and had to be ended"
    assert asked == [{0: "the others are gone", 1: lost}]


def is_lost_once(
    address: RankAddress, folder: Path, epoch: int, *, abort: Abort | None = None
) -> None:
    """Rank 1, in the first epoch; in the second ranks end when they are asked to stop."""
    assert abort is not None
    if epoch == 1:
        if address.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        asked = threading.Event()
        abort.then(asked.set)
        asked.wait(FOREVER_S)
        raise CommError("the others are gone")
    deadline = time.monotonic() + 600
    while not own_stop().asked and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / f"stopped{address.rank}").touch()


def test_a_signal_while_an_epoch_begins_asks_every_rank_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that stays, and the new one, which is not up yet."""
    begun = Crew.begin

    def begin(crew: Crew, epoch: Epoch) -> None:
        begun(crew, epoch)
        for each in crew._ranks.values() if epoch.args[-1] == 2 else ():
            each.process.terminate()

    monkeypatch.setattr(Crew, "begin", begin)
    epochs = [second_epoch(tmp_path)]

    def recover(_: Sequence[Failure]) -> Epoch | None:
        return epochs.pop() if epochs else None

    run_ranks(is_lost_once, (tmp_path, 1), 2, folder=tmp_path, recover=recover)
    assert sorted(path.name for path in tmp_path.glob("stopped*")) == ["stopped0", "stopped1"]


def second_epoch(folder: Path) -> Epoch:
    return Epoch((folder, 2), 2)


def test_a_signal_before_an_epoch_begins_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = list[Epoch](), Crew.begin

    def counted(crew: Crew, epoch: Epoch) -> None:
        begun.append(epoch)
        begin(crew, epoch)

    monkeypatch.setattr(Crew, "begin", counted)

    def recover(_: Sequence[Failure]) -> Epoch:
        os.kill(os.getpid(), signal.SIGTERM)
        return second_epoch(tmp_path)

    run_ranks(is_lost_once, (tmp_path, 1), 2, folder=tmp_path, recover=recover)
    assert len(begun) == 1


def fails_on(address: RankAddress, rank: int) -> int:
    if address.rank == rank:
        raise ValueError("once")
    return address.rank


def process_id(address: RankAddress) -> int:
    return os.getpid()


def test_pool_reuses_processes_and_replaces_failed_ones(pool: WorkerPool) -> None:
    first = pool.run(process_id, world_size=2)
    assert pool.run(process_id, world_size=2) == first
    with pytest.raises(RanksFailedError, match="rank 1: ValueError: once"):
        pool.run(fails_on, 1, world_size=2)
    assert not set(pool.run(process_id, world_size=2)) & set(first)


def hangs(address: RankAddress) -> None:
    if address.rank == 0:
        time.sleep(FOREVER_S)


def test_pool_ends_a_rank_that_hangs(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailedError, match="did not answer in time"):
        pool.run(hangs, world_size=2, timeout_s=1)


def trains_until_stopped(address: RankAddress, folder: Path, limit_s: float) -> None:
    """Three steps of a pipeline 0 -> 1 -> 2; then rank 2 is stopped, as by a debugger."""
    torch.set_num_threads(1)
    (folder / f"up{address.rank}").touch()
    while not all((folder / f"up{rank}").exists() for rank in range(3)):
        time.sleep(0.01)  # to start may take longer than a collective
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=limit_s)
    comm.recorder.keep_in(folder / "logs", patience_s=limit_s / 2)
    while True:
        if address.rank == 2 and comm.recorder.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        channels = [Channel((r, r + 1), r) for r in range(2)]
        if address.rank < 2:
            channel = channels[address.rank]
            part = torch.zeros(2)
            comm.send([(address.rank + 1, part)], channel=channel, name="activations")()
        if address.rank > 0:
            channel = channels[address.rank - 1]
            comm.receive(
                [(address.rank - 1, torch.zeros(2))], channel=channel, name="activations"
            )()
        comm.all_reduce(torch.zeros(1), name="step totals")
        comm.recorder.step += 1


def test_a_stopped_rank_is_named_with_those_who_wait_for_it(tmp_path: Path) -> None:
    def attempt(limit_s: float) -> None:
        folder = tmp_path / f"{limit_s:g}"
        folder.mkdir()
        with pytest.raises(RanksFailedError) as failed:
            run_ranks(trains_until_stopped, (folder, limit_s), 3, folder=folder)
        assert str(failed.value) == (
            "rank 0 waits in 'activations' (send 4) for rank 1, which waits in 'activations' "
            "(send 4) for rank 2, which has not been heard of since step 3"
        )
        assert failed.value.first.cause == "peer"

    within_some_limit(attempt, 4.0)
