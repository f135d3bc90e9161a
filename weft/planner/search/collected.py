"""What a search keeps, and the interpreter looks through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MADE_BETWEEN = 200_000
"""Objects, after which the interpreter looks for rings of them while it searches."""
SELDOM = 1_000
"""Such looks, after which it looks through older ones again."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A search keeps millions of small things and leaves no rings of them, so that looking for such
    rings finds nothing, and takes up to a fifth of its time; and so while what it kept is there."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(
        max(MADE_BETWEEN, young) if young else 0, max(SELDOM, middle), max(SELDOM, old)
    )
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
