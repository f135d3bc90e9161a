"""Rank 0 is looked for as long as is said, and whoever asks this process to stop is heard."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ports import free_port

from weft.comm import rendezvous
from weft.comm.address import RankAddress
from weft.comm.rendezvous import Rendezvous, await_ranks, unreached
from weft.config.errors import ConfigError

LONG_S = 300.0
NOBODY = "Nobody answers there: Connection refused."


def refusal(address: RankAddress, timeout_s: float) -> str:
    with pytest.raises(ConfigError) as caught, Rendezvous(address, timeout_s) as place:
        place.store("epoch")
    return str(caught.value)


@contextmanager
def no_names() -> Iterator[None]:
    """No name has an address."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        yield


def test_who_finds_nobody_says_why_in_the_time_that_is_said() -> None:
    port, began = free_port(), time.monotonic()
    said = refusal(RankAddress(rank=1, world_size=2, master=("127.0.0.1", port)), 0.3)
    assert said == (
        f"MASTER_ADDR = '127.0.0.1:{port}': expected the address and port where rank 0 can be "
        f"reached within 0.3 s. {NOBODY}"
    )
    assert time.monotonic() - began >= 0.3
    with no_names():
        said = refusal(RankAddress(rank=1, world_size=2, master=("head", 1)), 0.3)
    assert said == (
        "MASTER_ADDR = 'head:1': expected the address and port where rank 0 can be reached within "
        "0.3 s. The name head does not resolve: Name or service not known."
    )


def test_rank_0_may_come_late() -> None:
    port = free_port()
    found = list[str]()
    looking = threading.Thread(
        target=lambda: found.append(unreached("127.0.0.1", port, LONG_S)), daemon=True
    )
    looking.start()
    time.sleep(0.2)
    with socket.create_server(("127.0.0.1", port)):
        looking.join(LONG_S)
    assert found == [""]


def test_something_else_that_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent, and is not waited for longer than is said."""
    monkeypatch.setattr(rendezvous, "LEAST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        master = other.getsockname()[:2]
        said = refusal(RankAddress(rank=1, world_size=2, master=master), 0.5)
    assert said.endswith("can be reached within 0.5 s. What listens there is no rank 0.")


@pytest.mark.parametrize("meets", ["rank 0", "nobody", "another"])
def test_ctrl_c_is_heard_while_ranks_are_waited_for(meets: str) -> None:
    rank = 1 if meets != "rank 0" else 0
    other = socket.create_server(("127.0.0.1", 0)) if meets == "another" else None
    port = free_port() if other is None else other.getsockname()[1]
    address = RankAddress(rank=rank, world_size=2, master=("127.0.0.1", port))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt), Rendezvous(address, LONG_S) as place:
            await_ranks(place.store("epoch"), rank, 2, LONG_S)
    finally:
        timer.join()
        if other is not None:
            other.close()
        signal.signal(signal.SIGINT, before)


def test_rank_0_at_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in a line. An address that leads here is as good, whoever has it."""
    monkeypatch.setattr(rendezvous, "_is_here", lambda _: False)
    monkeypatch.setattr(rendezvous, "OWN_S", 0.2)
    address = RankAddress(rank=0, world_size=1, master=("127.0.0.1", free_port()))
    with Rendezvous(address, LONG_S) as place:
        assert await_ranks(place.store("epoch"), 0, 1, LONG_S) == [""]

    def refused(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    assert refusal(address, LONG_S) == (
        "MASTER_ADDR = '127.0.0.1': expected the name or address of this machine, which has rank "
        f"0. {NOBODY}"
    )
