"""Processes that know the device ``chipb``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chipb.build import built, compiler

from weft.elastic.pool import WorkerPool


@pytest.fixture(scope="session")
def library() -> Path:
    """The device, built if it never was on this machine."""
    if compiler() is None:
        pytest.skip("no C++ compiler to build the device with")
    return built()


@pytest.fixture(scope="session")
def chips(library: Path) -> Iterator[WorkerPool]:
    """A pool of their own: what they loaded cannot be taken back."""
    with WorkerPool() as pool:
        yield pool
