"""Names for parts of a step in a profiler's trace. They cost nothing while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

CALL = "call: "
"""Begins the name of a span in which this rank begins a collective or a message."""
WAIT = "wait: "
"""Begins the name of a span in which this rank's thread waits for other ranks."""
_NOTHING = nullcontext()
_switch = {"on": False}


def switch(*, on: bool) -> None:
    """Give names from now on, or no longer."""
    _switch["on"] = on


def span(name: str) -> AbstractContextManager[object]:
    """A part of a step, as a trace will call it."""
    if not _switch["on"]:
        return _NOTHING
    from torch.profiler import record_function

    return record_function(name)
