"""The process groups of one rank, each opened by its members alone.

PyTorch offers groups of one global default group, which every process of the job opens. Here each
group is an object of its own that meets at a store under a name made of its ranks and purpose: a
rank opens those that it is in, several epochs fit in one process, and closing leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from weft.comm.abort import ENDED, Abort
from weft.comm.errors import CommError
from weft.comm.members import in_words
from weft.comm.wires import Wires
from weft.platform.base import group_of
from weft.platform.registry import platform_named

ABORT_S = 2.0
"""How long leaving groups at once may take before the rest of it is left to a thread."""

_BY_GLOO = "/gloo/"
"""In the names of groups that talk through gloo."""


class Group:
    """One open process group. Its ranks are those of the job, ascending."""

    def __init__(self, ranks: tuple[int, ...], handle: ProcessGroup, store: Store) -> None:
        self.ranks = ranks
        self.store = store
        """Of this group alone."""
        self._handle: ProcessGroup | None = handle
        self._numbers = {rank: number for number, rank in enumerate(ranks)}

    @property
    def handle(self) -> ProcessGroup:
        """PyTorch's object.

        Raises:
            CommError: the group was closed.
        """
        if self._handle is None:
            raise CommError(f"the group of {in_words(self.ranks)} was closed")
        return self._handle

    def number(self, rank: int) -> int:
        """A rank's number within the group."""
        return self._numbers[rank]

    def release(self) -> ProcessGroup:
        """PyTorch's object, which is the caller's now: it ends when that lets go of it."""
        handle, self._handle = self.handle, None
        return handle


class Groups:
    """Opens groups at a store and closes all of them. One object an epoch.

    All ranks open the groups that they share in the same order: opening one waits for its members.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        *,
        timeout_s: float,
        is_local: bool = False,
        abort: Abort | None = None,
    ) -> None:
        """``timeout_s``: how long opening a group, and each of its calls, may take; ``is_local``:
        all ranks are on this machine; ``abort``: what ends waiting for members."""
        self.rank = rank
        self._store = store
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._is_local = is_local
        self._abort = abort
        self._lock = threading.Lock()
        """Who aborts may be another thread."""
        self._ending: threading.Thread | None = None
        """Aborts them; None: nobody asked for that."""
        self._open: dict[str, Group] = {}
        self._gloo_devices: list[Any] = []
        self._wires = Wires()
        """Of gloo, which does not end a call while the peer is silent, as a lost machine is."""

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, ranks: Sequence[int], backend: str, purpose: str, *, sends: bool = False
    ) -> Group:
        """The group of these ranks for this purpose; created by the first call.

        ``sends``: messages from rank to rank alone go over it.

        Raises:
            CommError: a member has not come, or was lost.
        """
        members = tuple(sorted(ranks))
        digest = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()
        name = f"{purpose}/{backend}/{digest[:16]}"  # as short as a key should be; see _BY_GLOO
        if self._ending is not None:
            raise CommError(f"rank {self.rank}: {ENDED}")
        found = self._open.get(name)
        if found is None:
            assert self.rank in members, f"rank {self.rank} opens the group of {in_words(members)}"
            found = self._new(name, members, backend, sends=sends)
            self._add(name, found)
        return found

    def _add(self, name: str, group: Group) -> None:
        """Raises CommError where all groups were left meanwhile."""
        with self._lock:
            if self._ending is None:
                self._open[name] = group
                return
        with suppress(RuntimeError):  # a library may know no way to abort
            group.release().abort()
        raise CommError(f"rank {self.rank}: {ENDED}")

    def close(self) -> None:
        """Leave every group, once its members have connected.

        A rank that left earlier would break those that are still connecting.
        """
        for group in list(self._open.values()):
            with suppress(RuntimeError):  # a member was lost: nothing is left to wait for
                group.store.wait([_connected(n) for n in range(len(group.ranks))], self._timeout)
        with self._lock:
            handles = self._released(self._open)
        for handle in handles:
            handle.shutdown()

    def abort(self) -> None:
        """Leave every group at once, whatever goes on there.

        Between machines calls on gloo end as their connections are cut. On one machine those that
        wait for a peer which neither answers nor is gone end at their limit: the groups' threads
        and sockets stay until then, but nobody waits for it here. What ends at once is waited for:
        a process that left meanwhile would be terminated by its own threads.
        So gloo's come last: what waits on a device for a peer that failed ends first.
        """
        with self._lock:
            if self._ending is None:
                by_gloo = [name for name in self._open if _BY_GLOO in name]
                others = [name for name in self._open if _BY_GLOO not in name]
                handles = self._released([*by_gloo, *others])
                args = (handles, len(by_gloo), self._wires)
                self._ending = threading.Thread(
                    target=_end, args=args, name="abort groups", daemon=True
                )
                self._ending.start()
        self._ending.join(ABORT_S)

    def _released(self, names: Iterable[str]) -> list[ProcessGroup]:
        handles = [self._open[name].release() for name in names]
        self._open = {}
        self._gloo_devices.clear()
        return handles

    def _new(self, name: str, members: tuple[int, ...], backend: str, *, sends: bool) -> Group:
        store = PrefixStore(name, self._store)
        number = members.index(self.rank)
        try:
            self._meet(store, "coming", number, len(members))
            inner = PrefixStore("backend", store)
            handle = self._handle(backend, inner, number, len(members), sends=sends)
            store.set(_connected(number), "1")
            self._meet(store, "connected", number, len(members))
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            message = f"rank {self.rank}: connecting {in_words(members)} failed: {text}"
            raise CommError(message) from error
        return Group(members, handle, store)

    def _meet(self, store: Store, where: str, number: int, size: int) -> None:
        """Wait for all members, where that may be aborted. Gloo cannot give up to connect, so none
        begins before all are there, nor goes on, where it may be lost, before all have connected.
        """
        if self._abort is not None:
            store.set(f"{where}/{number}", "1")
            marks = [f"{where}/{each}" for each in range(size)]
            self._abort.wait(store, marks, self._timeout.total_seconds())

    def _handle(
        self, backend: str, store: Store, number: int, size: int, *, sends: bool
    ) -> ProcessGroup:
        if backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = self._timeout
            with nullcontext() if self._is_local else self._wires.noted():
                options._devices = self._devices()
                options._threads = 2 * len(options._devices)
                gloo = ProcessGroupGloo(store, number, size, options)
            return group_of(gloo, "gloo", store, self._device)
        platform = platform_named(self._device.type)
        make = platform.open_channel if sends else platform.open_group
        return make(backend, store, number, size, self._timeout)

    def _devices(self) -> list[Any]:
        """Network interfaces for gloo, each with one thread, shared by all groups of the epoch."""
        if not self._gloo_devices:
            names = os.environ.get("GLOO_SOCKET_IFNAME", "")
            if not names and self._is_local:  # nothing needs to leave the machine
                known = [name for _, name in socket.if_nameindex()]
                names = "lo" if "lo" in known else known[0]
            make = ProcessGroupGloo.create_device
            with _taking_turns():
                self._gloo_devices = [
                    make(interface=name) for name in names.split(",") if name
                ] or [ProcessGroupGloo.create_default_device()]
        return self._gloo_devices


def _end(handles: list[ProcessGroup], by_gloo: int, wires: Wires) -> None:
    """The last first; ``by_gloo``: how many of the first ones the wires are of."""
    while handles:
        if len(handles) == by_gloo:
            wires.cut()
        with suppress(RuntimeError):  # a library may know no way to abort
            handles.pop().abort()


@contextmanager
def _taking_turns() -> Iterator[None]:
    """Threads that begin here wait until a processor is free, instead of taking it when they wake.

    Gloo's thread asks again and again for a connection that another thread has locked. That one
    wakes it, by a message to the next rank here, while it holds the lock: a thread that takes its
    processor then keeps it for milliseconds, for nothing. Only Linux says so of single threads.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    usual = os.sched_getparam(0)
    with suppress(OSError):  # what this process runs in may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, usual)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, usual)


def _connected(number: int) -> str:
    return f"connected/{number}"
