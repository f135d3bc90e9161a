"""Imports without the collector of garbage.

They make a million objects and hardly any garbage, and it looks through all of them again and
again: a tenth of the time that PyTorch takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked through meanwhile, and what is there afterwards never is, nor at the
    end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
