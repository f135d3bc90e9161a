"""Work of some ranks that the others wait for, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from weft.comm.comm import Comm
from weft.comm.errors import CommError

T = TypeVar("T")


def with_heartbeat(comm: Comm, work: Callable[[], T], *, name: str) -> T:
    """Do ``work``; return when every rank's is done. Collective.

    Ranks show one another that they are alive, so that only a lost one meets the limit of a
    collective and not a slow one.
    """
    done = threading.Event()
    lost: list[CommError] = []

    def show_life() -> None:
        try:
            while any(comm.gather_json(not done.wait(comm.timeout_s / 4), name=name)):
                pass
        except CommError as error:
            lost.append(error)

    thread = threading.Thread(target=show_life, name=name, daemon=True)
    thread.start()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    if lost:
        raise lost[0]
    return result
