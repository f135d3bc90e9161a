"""Threads of a process that move bytes of checkpoints, which goes on without Python's lock."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

_MOST = 8


def in_threads(work: Callable[..., None], parts: Sequence[tuple[Any, ...]]) -> None:
    """``work(*part)`` for every part, in any order; once all have ended raises what one raised."""
    if len(parts) == 1:
        work(*parts[0])
    else:
        futures = [_pool().submit(work, *part) for part in parts]
        wait(futures)
        for future in futures:
            future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST), "checkpoint")
