"""A rank without its parent is of no use to anybody: nobody would read how it ended, or end it."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however that one ended.

    A thread waits for the end of a pipe that only the parent holds open; it costs nothing.
    """
    parent = parent_process()
    assert parent is not None, "only a process that another one started has a parent"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
