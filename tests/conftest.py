"""What every test shares: one pool of ranks, reused from test to test."""

from collections.abc import Iterator

import pytest

from weft.elastic.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool
