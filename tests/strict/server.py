"""One thread that all ranks of a job ask, over a socket of this machine."""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from strict.rules import Question, Rules

QUIET_S = 0.25
"""After that long without a word it is asked whether somebody waits for ever."""
SILENT_S = 300.0
"""Ranks wait, and whom they wait for says nothing: it hangs somewhere else."""


@dataclass(frozen=True)
class Where:
    """How ranks find the server."""

    socket: str


class Server:
    """Runs the rules of one job in a thread of this process. A context manager."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._folder = tempfile.TemporaryDirectory(prefix="weft-strict-")
        self.where = Where(str(Path(self._folder.name) / "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, Connection] = {}
        self._ends, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="strict", daemon=True)

    def __enter__(self) -> Server:
        self._listener.bind(self.where.socket)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ends, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join()
        for each in [self._listener, self._ends, *self._pipes.values()]:
            each.close()
        self._selector.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        heard = time.monotonic()
        while True:
            due = self.rules.advance(time.monotonic())
            self._answer()
            wait = QUIET_S if due is None else max(0.0, due - time.monotonic())
            ready = self._selector.select(wait)
            if ready:
                heard = time.monotonic()
            elif due is None:
                self.rules.check()
                if time.monotonic() - heard > SILENT_S:
                    self.rules.fail(f"nobody came for {SILENT_S:g} s: {self.rules.status()}")
            for key, _ in ready:
                if key.data is None:
                    return
                try:
                    key.data()
                except Exception as error:
                    self.rules.fail(f"the strict server failed: {error!r}")
                    raise

    def _accept(self) -> None:
        pipe = Connection(self._listener.accept()[0].detach())
        rank = pipe.recv()
        self._pipes[rank] = pipe
        self._selector.register(pipe, selectors.EVENT_READ, self._reader(rank, pipe))

    def _reader(self, rank: int, pipe: Connection) -> Callable[[], None]:
        def read() -> None:
            try:
                message: tuple[Any, ...] = pipe.recv()
            except (EOFError, ConnectionError):
                self._selector.unregister(pipe)
                self.rules.leave(rank)
                return
            if len(message) == 1:
                self.rules.post(rank, message[0], time.monotonic())
            else:
                question, place = message
                self.rules.wait(rank, Question(*question), place, time.monotonic())

        return read

    def _answer(self) -> None:
        answers, self.rules.answers = self.rules.answers, []
        for answer in answers:
            try:
                self._pipes[answer.rank].send(answer)
            except (OSError, KeyError):  # who asked has gone meanwhile
                self.rules.leave(answer.rank)
