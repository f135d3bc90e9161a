"""Where the machines of a job find its head, and where its ranks find one another."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from weft.comm.proven import server_at
from weft.elastic.rank_process import end_with_parent
from weft.train.run_folder import NODES_FILE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

STORE_S = 120.0
"""How long the process of a store may take to begin."""


@dataclass(frozen=True, slots=True)
class Where:
    """The head listens at this port of its machine to those who know the secret."""

    port: int
    secret: str

    def write(self, folder: Path) -> None:
        draft = folder / f"{NODES_FILE}.{os.getpid()}"
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(asdict(self)))
        draft.replace(folder / NODES_FILE)

    @staticmethod
    def read(folder: Path) -> Where | None:
        """None where no head works, or works no more."""
        with suppress(OSError, ValueError, TypeError):
            return Where(**json.loads((folder / NODES_FILE).read_text()))
        return None


def bound_to(host: str) -> str:
    """The address at which others reach this machine under that name: loopback for a job on one
    machine, else all of its own."""
    found = {place[0] for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    is_here = all(ip_address(str(each).partition("%")[0]).is_loopback for each in found)
    is_name = host != "localhost" and not _is_address(host)
    # Debian's machines know their own name as a loopback address.
    if not is_here or is_name:
        return ""
    return "::1" if found == {"::1"} else "127.0.0.1"


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


class Store:
    """A process that the ranks of all epochs meet at; it is nobody's rank and outlives them."""

    def __init__(self, host: str, context: ForkServerContext) -> None:
        self._host, self._context = host, context
        self._process: BaseProcess | None = None
        self._port = 0

    def port(self) -> int:
        """Where it listens. It is begun anew where it was ended from outside."""
        if self._process is None or not self._process.is_alive():
            ours, theirs = self._context.Pipe()
            args = (self._host, theirs)
            self._process = self._context.Process(target=host_store, args=args, name="store")
            self._process.start()
            with ours, theirs:
                assert ours.poll(STORE_S), "the process of the store does not answer"
                self._port = ours.recv()
        return self._port

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def host_store(host: str, pipe: Connection) -> None:
    """Code of the process: serve as long as the launcher is there."""
    end_with_parent()
    store = store_at(host)
    pipe.send(store.port)
    threading.Event().wait()
    del store


def store_at(host: str) -> TCPStore:
    """It listens as ``bound_to`` says."""
    from torch._C._distributed_c10d import TCPStore

    listener = server_at(host)
    return TCPStore(
        host or "127.0.0.1",
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
