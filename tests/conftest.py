"""What every test shares: one pool of ranks, reused from test to test."""

import signal
from collections.abc import Iterator

import pytest

from weft.elastic.pool import WorkerPool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so; commands under test must hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody measured of this machine changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_PROFILES", str(tmp_path_factory.mktemp("no-profiles")))
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool
