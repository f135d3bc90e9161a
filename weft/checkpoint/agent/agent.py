"""The agent of one machine: it writes what ranks have copied, and outlives them until it is done.

Ranks that are killed while it writes change nothing: what all of them copied becomes a checkpoint,
what only some copied is discarded, and the checkpoint before it stays. Agents of several machines
meet in the folder that they write into: the one beside the first rank opens it, the others put the
facts of their files beside those, and it commits.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weft.checkpoint.agent.image import Image, opened_image
from weft.checkpoint.agent.wire import (
    Commit,
    Failed,
    Hello,
    Memory,
    Message,
    Save,
    Saved,
    Snapshot,
    Wire,
    Written,
)
from weft.checkpoint.entry import JSON, CheckpointError, RankFile, rank_file_name, told
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.rank_file import write_pieces
from weft.checkpoint.store import abandon, begin, commit, prune, temporary

FIRST_RANK_S = 120.0
"""An agent that nobody speaks to ends after so long."""
WRITERS = 4
"""Files that are written at the same time."""
_LOOK_S = 0.05
"""How often the folder is looked at for what other machines write."""

T = TypeVar("T")


@dataclass(eq=False)
class _Rank:
    """One that speaks to this agent."""

    wire: Wire
    hello: Hello | None = None
    images: dict[int, Image] = field(default_factory=dict)


@dataclass(eq=False)
class _Pending:
    """A save of which something came."""

    save: Save
    slots: dict[_Rank, int] = field(default_factory=dict)
    order: Commit | None = None

    def is_complete(self, ranks: list[_Rank]) -> bool:
        """Everything that ranks of this machine have to say of it was said."""
        hellos = [rank.hello for rank in ranks if rank.hello is not None]
        if not hellos or len(self.slots) < hellos[0].ranks_here:
            return False
        return self.order is not None or not any(hello.commits for hello in hellos)


class Agent:
    """Speaks to the ranks of one machine until they and its work have ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._address = Path(listener.getsockname())
        self._select = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._pending: dict[str, _Pending] = {}
        self._jobs = ThreadPoolExecutor(1, "persist")
        self._working = 0
        self._done, self._tell = socket.socketpair()

    def serve(self) -> None:
        """Return when the last rank has gone and everything is written or discarded."""
        self._listener.setblocking(False)
        self._select.register(self._listener, selectors.EVENT_READ)
        self._select.register(self._done, selectors.EVENT_READ)
        alone_since = time.monotonic()
        while self._ranks or self._working or time.monotonic() - alone_since < FIRST_RANK_S:
            ready = [key.fileobj for key, _ in self._select.select(timeout=1.0)]
            # Who has come is known before anybody is heard: ranks may all be gone by now.
            for source in sorted(ready, key=lambda source: source is not self._listener):
                self._heard(source)
            if self._ranks:
                alone_since = -FIRST_RANK_S  # whoever came has gone when none is left
        self._jobs.shutdown()
        self._unname()

    def _heard(self, source: object) -> None:
        if source is self._listener:
            with suppress(BlockingIOError):
                while True:
                    rank = _Rank(Wire(self._listener.accept()[0]))
                    self._ranks.append(rank)
                    self._select.register(rank.wire, selectors.EVENT_READ)
        elif source is self._done:
            self._working -= len(self._done.recv(64))
        else:
            rank = next(rank for rank in self._ranks if rank.wire is source)
            for message in rank.wire.read():
                self._obey(rank, message)
            if not rank.wire.is_open:
                self._left(rank)

    def _obey(self, rank: _Rank, message: Message) -> None:
        match message:
            case Hello():
                rank.hello = message
                if sum(each.hello is not None for each in self._ranks) == message.ranks_here:
                    self._unname()
            case Memory():
                image = opened_image(rank.wire.take_file(), message.pieces_bytes)
                rank.images[message.slot] = image
            case Snapshot():
                self._of(message.save).slots[rank] = message.slot
                self._begin_complete(message.save)
            case Commit():
                self._of(message.save).order = message
                self._begin_complete(message.save)
            case _:
                raise AssertionError(f"a rank said {message}")

    def _of(self, save: Save) -> _Pending:
        return self._pending.setdefault(save.name, _Pending(save))

    def _begin_complete(self, save: Save) -> None:
        if self._pending[save.name].is_complete(self._ranks):
            pending = self._pending.pop(save.name)
            self._begin(pending, lambda: self._persist(pending))

    def _begin(self, pending: _Pending, work: Callable[[], None]) -> None:
        def job() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told to whoever asked, and written down
                sys.stderr.write(f"step {pending.save.step}: {type(error).__name__}: {error}\n")
                sys.stderr.flush()
                for rank in pending.slots:
                    rank.wire.send(Failed(step=pending.save.step, problem=str(error)))
            finally:
                for rank, slot in pending.slots.items():
                    rank.wire.send(Written(slot=slot))
                self._tell.send(b".")

        self._working += 1
        self._jobs.submit(job)

    def _left(self, gone: _Rank) -> None:
        """A rank ended, or was killed: what it did not copy any more is discarded."""
        self._select.unregister(gone.wire)
        self._ranks.remove(gone)
        for name, pending in list(self._pending.items()):
            is_lost = gone not in pending.slots or (pending.order is None and _commits(gone))
            if is_lost or not self._ranks:
                del self._pending[name]
                self._begin(pending, lambda pending=pending: _decline(pending, self._ranks))  # type: ignore[misc]

    def _persist(self, pending: _Pending) -> None:
        """Write the files of this machine; commit them with those of the others, or leave facts."""
        save, order = pending.save, pending.order
        if order is None:
            _until(lambda: _mark(save).exists() or None, f"step {save.step} to be opened", 3600.0)
            for facts in _written(pending):
                _leave(save, facts.file, rank_file_json(facts))
            return
        began = time.monotonic()
        try:
            begin(save.folder, save.step)
            _mark(save).touch()
            files = _written(pending)
            files += _from_others(order, {facts.file for facts in files})
            _mark(save).unlink()
            commit(save.folder, save.step, files, order.state)
        except Exception:
            abandon(save.folder, save.step)
            raise
        prune(save.folder, order.keep)
        num_bytes = sum(facts.bytes for facts in files)
        saved = Saved(step=save.step, seconds=time.monotonic() - began, bytes=num_bytes)
        for rank in pending.slots:
            if _commits(rank):
                rank.wire.send(saved)

    def _unname(self) -> None:
        """Nobody else will come: leave no socket behind, however this process ends."""
        with suppress(OSError):
            self._address.unlink()
            self._address.parent.rmdir()


def _commits(rank: _Rank) -> bool:
    return rank.hello is not None and rank.hello.commits


def _written(pending: _Pending) -> list[RankFile]:
    """Facts of the files of this machine's ranks, by rank."""
    folder = temporary(pending.save.folder, pending.save.step)

    def write(rank: _Rank, slot: int) -> RankFile:
        assert rank.hello is not None, "a snapshot before hello"
        image = rank.images[slot]
        return write_pieces(folder, rank.hello.rank, image.pieces, image.data)

    with ThreadPoolExecutor(WRITERS, "writer") as pool:
        under_way = [pool.submit(write, *each) for each in pending.slots.items()]
        return [future.result() for future in under_way]


def _decline(pending: _Pending, ranks: list[_Rank]) -> None:
    """Let whoever waits for the files of this machine know that they will not come."""
    problem = f"a rank ended before it had copied step {pending.save.step}"
    if any(map(_commits, [*ranks, *pending.slots])):
        raise CheckpointError(problem)  # nothing was opened
    with suppress(CheckpointError):
        _until(lambda: _mark(pending.save).exists() or None, "", 60.0)
        for rank in pending.slots:
            assert rank.hello is not None, "a snapshot before hello"
            _leave(pending.save, rank_file_name(rank.hello.rank), {"problem": problem})
    raise CheckpointError(problem)


def _mark(save: Save) -> Path:
    """A file that says that the folder of a step is this save's."""
    return temporary(save.folder, save.step) / f"save-{save.name}"


def _facts_file(save: Save, file: str) -> Path:
    return (temporary(save.folder, save.step) / file).with_suffix(".facts.json")


def _leave(save: Save, file: str, facts: Mapping[str, JSON]) -> None:
    path = _facts_file(save, file)
    draft = path.with_suffix(".tmp")
    with told("written", path):
        draft.write_text(json.dumps(facts))
        draft.replace(path)


def _from_others(order: Commit, mine: set[str]) -> list[RankFile]:
    """What agents of other machines left, once all is there."""
    found = []
    for rank in range(order.world_size):
        name = rank_file_name(rank)
        if name in mine:
            continue
        path = _facts_file(order.save, name)
        data = _until(lambda path=path: _json(path), f"{name} of another machine", order.timeout_s)  # type: ignore[misc]
        if "problem" in data:
            raise CheckpointError(f"rank {rank}: {data['problem']}")
        path.unlink()
        found.append(rank_file_from_json(data))
    return found


def _json(path: Path) -> dict[str, JSON] | None:
    try:
        data: dict[str, JSON] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return data


def _until(found: Callable[[], T | None], what: str, timeout_s: float) -> T:
    """What ``found`` finds, once it does. Raises CheckpointError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_LOOK_S)
    return result
