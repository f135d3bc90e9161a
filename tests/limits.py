"""Where a limit of seconds is the thing tested: a machine that is too busy for it gets more."""

from collections.abc import Callable
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
