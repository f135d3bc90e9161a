"""What every test shares: one pool of ranks, reused from test to test."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from typing import Any, cast

import pytest
from hypothesis import settings

from weft.elastic.pool import ANSWER_S, Job, WorkerPool
from weft.elastic.processes import COMPILER, PRELOADED, warm_context
from weft.planner.problem import Options
from weft.planner.search import Watch

forkserver.set_forkserver_preload(list(PRELOADED))  # whichever test is the first to start it

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Of processes that tests start: threads that poll for work take the cores from those that have it,
and a run of one rank with two threads took up to 19 times as long."""

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
"""Of PyTorch's compiler, whose processes import it again: each takes longer than what it compiles
here."""

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
"""Likewise: what the processor says that it can do is not tried by four programs, each in a process
of its own, again in every process that compiles."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so; commands under test must hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(50_000, 20, 20)  # plans are made of many small objects, none of them in a circle

settings.register_profile("patient", deadline=None)  # a busy machine is slower, not wrong
settings.load_profile("patient")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores: many a test waits for others."""
    cores = len(os.sched_getaffinity(0))
    return cores + max(1, cores // 2)


FIRST = (
    "test_tune_command",
    "test_guards",
    "test_chaos",
    "test_slurm",
    "test_build",
    "test_per_node",
)
"""Files with tests of half a minute: none of these may be the last, for which all others wait."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import stays: the collector of garbage never looks through these objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody measured of this machine changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_PROFILES", str(tmp_path_factory.mktemp("no-profiles")))
        yield


class PatientPool(WorkerPool):
    """Ranks may take long, and meet when all have started: a machine may be busy."""

    def run(self, job: Job, *args: Any, world_size: int, timeout_s: float = ANSWER_S) -> list[Any]:
        if len(self._workers) < world_size:
            super().run(repr, world_size=world_size)
        return super().run(job, *args, world_size=world_size, timeout_s=timeout_s)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for plans give up early, and refine few: for tests of what is done with a plan,
    however good."""
    known = cast("dict[str, object]", Options.__init__.__kwdefaults__)
    monkeypatch.setitem(known, "effort", known["effort"] // 30)
    refines_few(monkeypatch)


@pytest.fixture
def refining_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches refine few of what they find: likewise, where several plans are wanted."""
    refines_few(monkeypatch)


def refines_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("MOST_PROMISING", 4), ("MOST_ALIKE", 2), ("MOST_BARE", 2)):
        monkeypatch.setattr(f"weft.planner.search.refined.{name}", few)


@pytest.fixture
def first_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end with the first plan that fits: likewise, where it may be of one kind of chip."""
    monkeypatch.setattr(Watch, "is_over", True)


@pytest.fixture
def default_hang_up() -> Iterator[None]:
    """SIGHUP ends what a test starts: whoever runs the tests may ignore it (``nohup``)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    warm_context([*PRELOADED, COMPILER])
    with PatientPool() as pool:
        yield pool
