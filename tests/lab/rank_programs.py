"""What ranks do in the tests of the lab: small programs without torch, as ``PROGRAM FOLDER``."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
TIMEOUT_S = 300.0
PORT = 7000
SENT_BYTES = 6_000_000
SENT_TIMES = 3
"""The fastest counts: a busy machine is late now and then, and never early."""


def write(folder: Path, value: object) -> None:
    """What the test reads: whole, or not there."""
    draft = folder / f".rank{RANK}.tmp"
    draft.write_text(json.dumps(value))
    draft.replace(folder / f"rank{RANK}.json")


def step(folder: Path, number: int) -> None:
    """As the trainer does, in two writes: a torn line is no step."""
    with (folder / "metrics.jsonl").open("a") as file:
        text = json.dumps({"step": number, "loss": 1.0}) + "\n"
        file.write(text[:10])
        file.flush()
        file.write(text[10:])


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(99)
        time.sleep(0.01)


def told(folder: Path) -> None:
    """The environment, and where this is."""
    keys = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    ports = [name for _, name in socket.if_nameindex()]
    groups = Path("/proc/self/cgroup").read_text()
    sys.stdout.write(f"rank {RANK} speaks\n")
    write(folder, {**{key: os.environ[key] for key in keys}, "ports": ports, "groups": groups})


def spin_for(seconds: float) -> float:
    """Part of a core that was had."""
    begun, had = time.monotonic(), time.process_time()
    while time.monotonic() < begun + seconds:
        pass
    return (time.process_time() - had) / (time.monotonic() - begun)


def share(folder: Path) -> None:
    """Waits until this gets no more of a core than asked: before and after the first step.

    The kernel may give more at a time than a quota says: what is asked must be seen once.
    """
    before, after = ((0.8, 1.1), (0.3, 0.14))[RANK]
    until(lambda: spin_for(0.6) < before)
    if RANK == 0:
        step(folder, 1)
    until((folder / "slowed").exists)
    until(lambda: spin_for(0.6) < after)
    until(lambda: not RANK or throttled() > 5 or spin_for(0.1) < 0)
    write(folder, throttled())


def throttled() -> int:
    """How often the kernel has made this wait, because its quota was used up."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu", "cpu,cpuacct"):
            file = Path(f"/sys/fs/cgroup/{'cpu' if controllers else ''}{path}/cpu.stat")
            words = file.read_text().split() if file.exists() else []
            if "nr_throttled" in words:
                return int(words[words.index("nr_throttled") + 1])
    return 0


def link(folder: Path) -> None:
    """Rank 0 takes some megabytes from every other rank in turn, and times them; with what a byte
    there and back takes, before and after."""
    master = os.environ["MASTER_ADDR"]
    if RANK:
        connection = connected(master, PORT + RANK)
        for _ in range(SENT_TIMES):
            bounce(connection)
            connection.sendall(bytes(SENT_BYTES))
            bounce(connection)
        return
    fastest, round_trips = [], []
    for rank in range(1, WORLD_SIZE):
        with socket.create_server((master, PORT + rank)) as server:
            connection, _ = server.accept()
            taken, trips = zip(*[taken_s(connection) for _ in range(SENT_TIMES)], strict=True)
            fastest.append(min(taken))
            round_trips.append(min(trips))
    write(folder, [fastest, round_trips])


def bounce(connection: socket.socket) -> None:
    connection.sendall(connection.recv(1))


def taken_s(connection: socket.socket) -> tuple[float, float]:
    """Until all that is sent once is here, after a byte's way there and back; and that way."""
    begun, left = time.monotonic(), SENT_BYTES
    trip = trip_s(connection)
    while left:
        left -= len(connection.recv(left))
    return time.monotonic() - begun, min(trip, trip_s(connection))


def trip_s(connection: socket.socket) -> float:
    begun = time.monotonic()
    connection.sendall(b".")
    connection.recv(1)
    return time.monotonic() - begun


def connected(host: str, port: int) -> socket.socket:
    found: list[socket.socket] = []

    def attempt() -> bool:
        try:
            found.append(socket.create_connection((host, port), timeout=TIMEOUT_S))
        except OSError:
            return False
        return True

    until(attempt)
    return found[0]


def echo(folder: Path) -> None:
    """Rank 0 sends a packet at a time and notes the longest silence; the others answer.

    Ends when the lab has told of something and, after that, an answer comes, or, with ``alone``,
    none.
    """
    master, alone = os.environ["MASTER_ADDR"], (folder / "alone").exists()
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    wire.settimeout(0.05)
    if RANK:
        wire.sendto(b"here", (master, PORT))
        while not (folder / "rank0.json").exists():
            try:
                packet, sender = wire.recvfrom(100)
                wire.sendto(packet, sender)
            except OSError:
                wire.sendto(b"here", (master, PORT))
        return
    wire.bind((master, PORT))
    until(lambda: answered(wire))
    step(folder, 1)
    longest, heard = 0.0, time.monotonic()
    end = heard + TIMEOUT_S
    while time.monotonic() < end:
        is_told = (folder / "told").exists()
        if answered(wire):
            now = time.monotonic()
            longest, heard = max(longest, now - heard), now
            if is_told and not alone:
                break
        elif is_told and alone and time.monotonic() - heard > 0.5:
            break
    write(folder, longest)


def answered(wire: socket.socket) -> bool:
    try:
        _, peer = wire.recvfrom(100)
        wire.sendto(b"?", peer)
    except OSError:
        return False
    return True


def hear(folder: Path) -> None:
    """Rank 0 listens to a connection: does it hear that the other is gone?"""
    master = os.environ["MASTER_ADDR"]
    if RANK:
        connected(master, PORT).recv(1)
        return
    with socket.create_server((master, PORT)) as server:
        connection, _ = server.accept()
    step(folder, 1)
    until((folder / "gone").exists)
    connection.settimeout(3.0)
    try:
        connection.recv(1)
        write(folder, "closed")
    except TimeoutError:
        write(folder, "silence")
    except ConnectionError:
        write(folder, "closed")


def beat(folder: Path) -> None:
    """Every rank notes the longest time between two looks at the clock."""
    longest, last = 0.0, time.monotonic()  # from before anybody may be stopped
    (folder / f"up{RANK}").touch()
    if RANK == 0:
        until((folder / "up1").exists)
        step(folder, 1)
        last = time.monotonic()
    end, is_over = last + TIMEOUT_S, False
    while not is_over and time.monotonic() < end:
        is_over = (folder / "over").exists()
        time.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    write(folder, longest)


def disk(folder: Path) -> None:
    """Write until the disk is full, then until it is not."""
    place = folder / "checkpoints"
    kept = (place / "old").read_text()
    seen = [kept]
    (place / "new").write_text("new")
    step(folder, 1)

    def refused() -> bool:
        try:
            with (place / "more").open("ab") as file:
                file.write(bytes(100_000))
        except OSError as error:
            return error.errno == errno.ENOSPC
        return False

    until(refused)
    seen.append("full")
    until(lambda: not refused())
    write(folder, [*seen, "room"])


def memory(folder: Path) -> None:
    """More than the chip has."""
    held = bytearray(200 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    write(folder, "survived")


def wait(folder: Path) -> None:
    """For SIGTERM, with a child that knows nothing of it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    write(folder, {"pid": os.getpid(), "child": child.pid})
    until(lambda: bool(asked), timeout_s=3600)  # longer than the test waits
    write(folder, "asked")


def fail(folder: Path) -> None:
    """Rank 1 refuses; rank 0 waits for it."""
    if RANK:
        sys.exit(3)
    until(lambda: False)


if __name__ == "__main__":
    programs = (told, share, link, echo, hear, beat, disk, memory, wait, fail)
    {program.__name__: program for program in programs}[sys.argv[1]](Path(sys.argv[2]))
