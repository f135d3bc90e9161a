"""Processes that know the device ``chipb``."""

from collections.abc import Iterator

import pytest
from chipb.build import built, compiler

from weft.elastic.pool import WorkerPool


@pytest.fixture(scope="session")
def chips() -> Iterator[WorkerPool]:
    """A pool of their own: what they loaded cannot be taken back."""
    if compiler() is None:
        pytest.skip("no C++ compiler to build the device with")
    built()
    with WorkerPool() as pool:
        yield pool
