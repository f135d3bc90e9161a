"""What every test shares: one pool of ranks, reused from test to test."""

from collections.abc import Iterator

import pytest

from weft.elastic.pool import WorkerPool


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
