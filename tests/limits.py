"""Limits of tests: of seconds, of which a machine that is too busy gets more, and of files."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
TIMES = (1, 8, 64)


def within_some_limit(attempt: Callable[[float], T], limit_s: float) -> T:
    """What ``attempt(seconds)`` finds; with longer limits where the machine broke this one.

    A program that is wrong is wrong with every limit: the last failure is raised.
    """
    for times in TIMES[:-1]:
        try:
            return attempt(times * limit_s)
        except (AssertionError, RuntimeError):
            continue
    return attempt(TIMES[-1] * limit_s)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this; writing more fails as on a full disk, with another word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
