"""Commands that begin warm: forked from the server that a test's ranks are forked from.

A new process imports PyTorch, and so does the server of its ranks: 4 s of the processor for each
command. One that is forked has imported it, and forks its server of ranks as well. From there on it
is what a shell would have started: a session of its own, the same parents and children, pipes and
signals.
"""

from __future__ import annotations

import atexit
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from weft.elastic.processes import warm_context

OUTPUTS = (1, 2)
MAIN = process.current_process()
"""As a new process is known to itself: this is read before a forked one has got its name."""


class WarmProcess:
    """``python -m weft ...`` in a session of its own, as ``subprocess.Popen`` would have it; or
    another module than ``weft``."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        module: str = "weft",
    ) -> None:
        pipes = [os.pipe() for _ in OUTPUTS]
        ends = [DupFd(end) for _, end in pipes]
        self._process = warm_context().Process(
            target=_begin,
            args=(ends, (module, *words), folder, dict(environment)),
            name="command",
        )
        self._process.start()
        for _, end in pipes:
            os.close(end)
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self.stdout, self.stderr = (os.fdopen(end, "rb", buffering=0) for end, _ in pipes)
        self._said: dict[Any, bytes] = {self.stdout: b"", self.stderr: b""}

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("weft", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed on both, once it has ended and nobody else could print there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for stream in filter(None, (self.stdout, self.stderr)):
                if not stream.closed:
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                ready = selector.select(left)
                if not ready:
                    raise subprocess.TimeoutExpired("weft", timeout or 0.0)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    self._said[key.fileobj] += data
                    if not data:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        output, errors = (said.decode() for said in self._said.values())
        return output, errors


def _begin(
    ends: Sequence[Any], words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> None:
    """Be the command, a module and its words: what it would find as a new process is put in order
    first."""
    os.setsid()
    for output, end in zip(OUTPUTS, ends, strict=True):
        os.dup2(fd := end.detach(), output)
        os.close(fd)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _fresh_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    process._current_process = MAIN  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    _fresh_helpers()
    util.spawnv_passfds = _fork_helper  # type: ignore[attr-defined]
    sys.argv = [*words]
    code: Any = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    _end(code)


def _end(code: Any) -> None:
    """As the interpreter does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _fresh_signals() -> None:
    """Handlers are those of a new interpreter; what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _fresh_helpers() -> None:
    """No server of ranks and no tracker is known."""
    forkserver._forkserver.__init__()  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None


_SPAWN = util.spawnv_passfds  # type: ignore[attr-defined]


def _fork_helper(path: Any, args: Sequence[Any], passed: Sequence[int]) -> int:
    """Start ``python -c PROGRAM``, which has nothing to import any more."""
    pid = os.fork()
    if pid:
        return pid
    util.spawnv_passfds = _SPAWN  # type: ignore[attr-defined]
    _fresh_signals()
    _fresh_helpers()
    process._children.clear()  # type: ignore[attr-defined]
    with Path(os.devnull).open("rb") as nothing:
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if fd > 2 and fd not in passed and fd != nothing.fileno():
                os.dup2(nothing.fileno(), fd)  # so that no other file gets the number
    code = 1
    try:
        exec(args[-1], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code)
