"""What a search keeps, and the interpreter looks through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MADE_BETWEEN = 200_000
"""Objects, after which the interpreter looks for rings of them while it searches."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A search keeps millions of small things and leaves no rings of them, so that looking for such
    rings finds nothing, and takes up to a fifth of its time; and so while what it kept is there."""
    usual = gc.get_threshold()
    gc.set_threshold(max(MADE_BETWEEN, usual[0]) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
