"""Where the ranks of a job find one another: a store that all of them can reach.

Whether every rank has come is asked before anything else is, so that nobody waits in vain.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from weft.comm.abort import Abort
from weft.comm.address import ARRIVAL_S, RankAddress
from weft.config.errors import ConfigError

GRACE_S = 10.0
"""How long rank 0, which may host the store, stays for the others to read what it wrote."""
LEAVE_S = 10.0
"""How long rank 0, where it hosts the store, stays for the others to leave."""
LOOPBACK = "127.0.0.1"
FIRST_LOOK_S, LOOK_S = 0.05, 1.0
"""From one look for rank 0 to the next: at first, and at most; and how long one takes."""
LEAST_S = 5.0
"""For a store that is there."""
OWN_S = 30.0
"""How long rank 0 looks for itself at an address that no device of its machine has: a service that
leads to it may come up late."""
ARRIVAL_LOOKS_S = (0.0005, 0.2)
"""As ``LOOKS_S`` of an abort: a thousand ranks may wait for the last one."""


class Rendezvous:
    """The store of a job. A rank opens it once and may join as many epochs there as it likes."""

    def __init__(
        self, address: RankAddress, timeout_s: float, *, abort: Abort | None = None
    ) -> None:
        """``timeout_s``: how long ranks may come one after another, and each collective take;
        ``abort``: what another thread ends the epoch with."""
        self.address = address
        self.timeout_s = timeout_s
        self.abort = abort
        self._base: Store | None = None
        self._is_host = False
        self._rounds: Counter[str] = Counter()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, traceback: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def store(self, purpose: str) -> Store:
        """Where ranks meet that call this with the same purpose equally often.

        Raises:
            ConfigError: the store cannot be reached.
        """
        if self._base is None:
            self._base = self._open()
        self._rounds[purpose] += 1
        return PrefixStore(f"{purpose}/{self._rounds[purpose]}", self._base)

    def close(self, *, wait: bool = True) -> None:
        """Leave. With ``wait`` a rank that hosts the store stays until the others have left."""
        base, self._base = self._base, None
        if base is None:
            return
        with suppress(RuntimeError):  # the store went with its host: nobody needs it
            base.set(f"left/{self.address.rank}", "1")
            if self._is_host and wait:
                others = [f"left/{rank}" for rank in range(1, self.address.world_size)]
                base.wait(others, timedelta(seconds=LEAVE_S))

    def _open(self) -> Store:
        store: Store
        if self.address.store_file is not None:
            # Never removed by a rank: the next epoch may begin before the last rank has left.
            store = FileStore(str(self.address.store_file), -1)
        else:
            store, self._is_host = _tcp_store(self.address, min(self.timeout_s, ARRIVAL_S))
        # Without it the ranks of a restarted job would read the addresses of dead processes.
        attempt = self.address.meeting or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"weft/{attempt}", store)
        number = store.add(f"opened/{self.address.rank}", 1)  # all ranks open it equally often
        return PrefixStore(str(number), store)


def _tcp_store(address: RankAddress, wait_s: float) -> tuple[Store, bool]:
    """The store at rank 0's address, and whether this process hosts it."""
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = address.rank == 0 and not (agent_hosts_it or address.meeting)
    host, port = address.master
    deadline = time.monotonic() + wait_s
    expected = f"the address and port where rank 0 can be reached within {wait_s:g} s"
    if is_host:
        _hold(2 * address.world_size)
    elif problem := unreached(host, port, wait_s):
        raise ConfigError("MASTER_ADDR", f"{host}:{port}", expected, problem)
    is_here = is_host and _is_here(host)
    open_store = partial(
        TCPStore,
        host if is_here or not is_host else LOOPBACK,
        port,
        is_master=is_host,
        multi_tenant=True,
        wait_for_workers=False,  # ``await_ranks`` does, and knows them by number
        timeout=timedelta(seconds=wait_s),
    )
    try:
        store = _opened(open_store, max(LEAST_S, deadline - time.monotonic()))
    except RuntimeError as error:
        problem = f"{str(error).splitlines()[0].rstrip('.')}."
        raise ConfigError("MASTER_ADDR", f"{host}:{port}", expected, problem) from error
    if is_host and not is_here and (problem := unreached(host, port, wait_s, OWN_S)):
        expected = "the name or address of this machine, which has rank 0"
        raise ConfigError("MASTER_ADDR", host, expected, problem)
    return store, is_host


def _opened(open_store: Callable[[], TCPStore], wait_s: float) -> TCPStore:
    """It hears no signal, nor looks at a clock, while something else that listens there is silent:
    another thread waits for that.

    Raises:
        RuntimeError: there is no store.
    """
    answer = Future[TCPStore]()

    def work() -> None:
        try:
            answer.set_result(open_store())
        except RuntimeError as error:
            answer.set_exception(error)

    thread = threading.Thread(target=work, name="opens a store", daemon=True)
    thread.start()
    try:
        store = answer.result(wait_s)
    except TimeoutError:
        raise RuntimeError("What listens there is no rank 0") from None
    thread.join()
    return store


def unreached(host: str, port: int, wait_s: float, known_s: float = math.inf) -> str:
    """Why nobody answers there, however often asked in so many seconds, ``known_s`` of them once
    the name is known; empty where somebody does. Signals are seen meanwhile."""
    deadline, look_s, problem = time.monotonic() + wait_s, FIRST_LOOK_S, ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left_s, LOOK_S)):
                return ""
        except socket.gaierror as error:
            problem = f"The name {host} does not resolve: {error.strerror}."
        except OSError as error:
            problem = f"Nobody answers there: {error.strerror or error}."
            deadline = min(deadline, time.monotonic() + known_s)
        time.sleep(min(look_s, max(0.0, deadline - time.monotonic())))
        look_s = min(2 * look_s, LOOK_S)
    return problem


def _is_here(host: str) -> bool:
    """An address of that name is this machine's own."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as end:
                end.bind(place)
                return True
    return False


def _hold(num_connections: int) -> None:
    """Let this process have so many at once, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + num_connections
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def await_ranks(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    says: str = "",
    *,
    abort: Abort | None = None,
) -> list[str]:
    """Return when every rank has come, with what each of them said, in rank order.

    Rank 0 waits for a mark of every rank, then writes down who is missing or what all said; all
    read the same. So every other rank asks the store a few times, however many they are.

    Raises:
        ConfigError: names the ranks that have not, on every rank that has.
        CommError: ``abort`` was asked.
    """
    store.set(f"here/{rank}", f"+{says}")
    marks = [f"here/{other}" for other in range(world_size)]
    said: list[str] = []
    if rank == 0:
        missing = [] if come(store, marks, timeout_s, abort) else _missing(store, marks)
        said = [] if missing else [mark.decode()[1:] for mark in store.multi_get(marks)]
        # Ranks say much alike, and packed it is a few kilobytes for a thousand of them.
        packed = zlib.compress(json.dumps([missing, said]).encode())
        store.set("arrived", packed)  # type: ignore[arg-type]  # PyTorch's stubs know no bytes
        present = [f"read/{r}" for r in range(1, world_size) if r not in missing]
        come(store, present, GRACE_S, abort)
    elif come(store, ["arrived"], timeout_s + GRACE_S, abort):
        missing, said = json.loads(zlib.decompress(store.get("arrived")))
        store.set(f"read/{rank}", "1")
    else:
        missing = [0]  # the store went with it
        with suppress(RuntimeError):
            missing = _missing(store, marks)
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        expected = f"as many processes to meet within {timeout_s:g} s"
        hint = f"Missing: {who}. Start one process for each rank, on every machine."
        raise ConfigError("WORLD_SIZE", world_size, expected, hint)
    return said


def come(store: Store, keys: list[str], timeout_s: float, abort: Abort | None = None) -> bool:
    """Whether somebody wrote each of the keys in time.

    Raises:
        CommError: ``abort`` was asked meanwhile.
    """
    if not keys:
        return True
    if abort is not None:
        return abort.wait(store, keys, timeout_s)
    with suppress(RuntimeError):  # the store went with its host
        return Abort().wait(store, keys, timeout_s, ARRIVAL_LOOKS_S)
    return False


def _missing(store: Store, marks: list[str], first: int = 0) -> list[int]:
    """The numbers of those that nobody wrote; asks little where few are missing."""
    if store.check(marks):
        return []
    if len(marks) == 1:
        return [first]
    half = len(marks) // 2
    return [*_missing(store, marks[:half], first), *_missing(store, marks[half:], first + half)]
