"""Calls that wait for one another, beside what a rank computes.

On a device whose library waits there, a stream of its own does the waiting, and the host goes on.
Where the host has to wait, threads do: one for the first steps of all chains, one for the second
ones and so on. So a step waits for those before it alone, whatever other ranks are late with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.comm.memory import ReusedMemory
from weft.comm.transport import Finish, nothing

Step = Callable[[], Finish]
"""Starts something."""


class Aside:
    """Chains of calls of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._threads: list[ThreadPoolExecutor] = []
        """By place in a chain."""
        self.rooms = ReusedMemory(device)
        """For what is received."""

    def chain(
        self, first: Finish, steps: Sequence[Step], *, on_host: bool
    ) -> tuple[Finish, Finish]:
        """What waits until ``first`` has ended, and what waits until all steps have.

        ``on_host``: the host has to wait for them.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        if on_host:
            return self._by_threads(first, steps)
        if self._stream is not None:
            return self._on_stream(self._stream, first, steps)
        return _when_asked(first, steps)

    def room(self, like: Tensor) -> Tensor:
        """Memory for what is received; let go of it as soon as steps have no use for it."""
        room = self.rooms.take(tuple(like.shape), like.dtype)
        if self._stream is not None:
            room.record_stream(self._stream)
        return room

    def close(self, *, wait: bool) -> None:
        """End the threads; with ``wait`` return when they have ended."""
        for thread in self._threads:
            thread.shutdown(wait=wait, cancel_futures=True)

    def _on_stream(
        self, stream: torch.Stream, first: Finish, steps: Sequence[Step]
    ) -> tuple[Finish, Finish]:
        with stream:
            first()
            begun = stream.record_event()
            for step in steps:
                step()()
            ended = stream.record_event()
        return self._after(lambda: begun), self._after(lambda: ended)

    def _by_threads(self, first: Finish, steps: Sequence[Step]) -> tuple[Finish, Finish]:
        futures: list[Future[Any]] = []
        before = [first]
        for place, step in enumerate((*steps, lambda: nothing)):
            if place == len(self._threads):
                name = f"chains {place}"
                self._threads.append(ThreadPoolExecutor(max_workers=1, thread_name_prefix=name))
            after: list[Finish] = []
            last = futures[-1:]
            futures.append(self._threads[place].submit(self._go_on, last, before, step, after))
            before = after
        return self._after(futures[0].result), self._after(futures[-1].result)

    def _go_on(
        self, last: list[Future[Any]], before: list[Finish], step: Step, after: list[Finish]
    ) -> Any:
        """Wait for what came before, and begin the next step. Nothing keeps what is over: memory
        that it referred to is free again. Returns when the first was, on the device."""
        for future in last:
            future.result()
        with nullcontext() if self._stream is None else self._stream:
            before.pop()()
            event = None if self._stream is None else self._stream.record_event()
            after.append(step())
        return event

    def _after(self, event: Callable[[], Any]) -> Finish:
        """What this rank does from now on comes after an event, which may still have to happen."""

        def finish() -> None:
            happened = event()
            if happened is not None:
                torch.accelerator.current_stream(self._device).wait_event(happened)

        return finish


def _when_asked(first: Finish, steps: Sequence[Step]) -> tuple[Finish, Finish]:
    """For a library that makes the host wait, in the one order that it needs."""
    left: list[Callable[[], None]] = [first]
    left += [lambda each=step: each()() for step in steps]  # type: ignore[misc]

    def until(number: int) -> None:
        while len(left) > number:
            left.pop(0)()

    return lambda: until(len(steps)), lambda: until(0)
