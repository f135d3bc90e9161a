"""The agent of one machine: it writes what ranks have copied, and outlives them until it is done.

Ranks that are killed while it writes change nothing: what all of them copied becomes a checkpoint,
what only some copied is discarded, and the checkpoint before it stays. Agents of several machines
meet in the folder that they write into: the one beside the first rank opens it, the others put the
facts of their files beside those, and it commits.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from weft.checkpoint.draft import Draft
from weft.checkpoint.entry import CheckpointError, RankFile, rank_file_name
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.store import prune

FIRST_RANK_S = 120.0
"""An agent that nobody speaks to ends after so long."""
WRITERS = 4
"""Files that are written at the same time."""

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


class Agent:
    """Speaks to the ranks of one machine until they and its work have ended."""

    def __init__(self, listener: socket.socket, parent: int) -> None:
        """``parent``: process id of the rank that started it."""
        self._listener = listener
        self._address = Path(listener.getsockname())
        self._select = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._pending: dict[str, _Pending] = {}
        self._jobs = ThreadPoolExecutor(1, "persist")
        self._working = 0
        self._here: set[int] = set()
        """Those who have come, some of whom may be gone by now."""
        self._ranks_here = 0
        self._commits = False
        """One of them says when to commit."""
        self._parent = parent
        self._done, self._tell = socket.socketpair()

    def serve(self) -> None:
        """Return when the last rank has gone and everything is written or discarded."""
        self._listener.setblocking(False)
        self._select.register(self._listener, selectors.EVENT_READ)
        self._select.register(self._done, selectors.EVENT_READ)
        stays_until = time.monotonic() + FIRST_RANK_S
        while self._ranks or self._working or time.monotonic() < stays_until:
            ready = [key.fileobj for key, _ in self._select.select(timeout=1.0)]
            # Who has come is known before anybody is heard: ranks may all be gone by now.
            for source in sorted(ready, key=lambda source: source is not self._listener):
                self._heard(source)
            if self._ranks or os.getppid() != self._parent:
                stays_until = 0.0  # nobody else will come when they are gone
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
            if rank.wire.has_ended:
                self._left(rank)

    def _obey(self, rank: _Rank, message: Message) -> None:
        match message:
            case Hello():
                rank.hello = message
                self._here.add(message.rank)
                self._ranks_here = message.ranks_here
                self._commits |= message.commits
                if len(self._here) == self._ranks_here:
                    self._unname()
            case Memory():
                image = opened_image(rank.wire.take_file(), message.pieces_bytes)
                rank.images[message.slot] = image
            case Snapshot():
                pending = self._of(message.save)
                pending.slots[rank] = message.slot
                self._look_at(pending)
            case Commit():
                pending = self._of(message.save)
                pending.order = message
                self._look_at(pending)
            case _:
                raise AssertionError(f"a rank said {message}")

    def _of(self, save: Save) -> _Pending:
        return self._pending.setdefault(save.name, _Pending(save))

    def _look_at(self, pending: _Pending) -> None:
        """Begin to write what is complete, and give up what never will be."""
        is_complete = len(pending.slots) == self._ranks_here
        if is_complete and (pending.order is not None or not self._commits):
            work = self._persist
        elif self._is_lost(pending):
            work = self._decline
        else:
            return
        del self._pending[pending.save.name]
        self._begin(pending, partial(work, pending))

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
        for pending in list(self._pending.values()):
            self._look_at(pending)

    def _is_lost(self, pending: _Pending) -> bool:
        """Somebody who has gone had something to say of it."""
        if not self._ranks:
            return True
        to_come = sum(rank not in pending.slots for rank in self._ranks)
        has_come = len(self._here) == self._ranks_here
        lacks_order = self._commits and pending.order is None
        return has_come and (
            len(pending.slots) + to_come < self._ranks_here
            or (lacks_order and not any(map(_commits, self._ranks)))
        )

    def _persist(self, pending: _Pending) -> None:
        """Write the files of this machine; commit them with those of the others, or leave facts."""
        save, order, draft = pending.save, pending.order, pending.save.draft()
        if order is None:
            _wait_for(draft, save)
            for number, facts in _written(pending, draft).items():
                draft.leave(number, rank_file_json(facts))
            return
        began = time.monotonic()
        draft.begin()
        try:
            mine = _written(pending, draft)
            files = [*mine.values(), *_from_others(order, draft, mine.keys())]
            draft.commit(files, order.state)
        except Exception:
            draft.abandon()
            raise
        num_bytes = sum(facts.bytes for facts in files)
        saved = Saved(step=save.step, seconds=time.monotonic() - began, bytes=num_bytes)
        for rank in pending.slots:
            if _commits(rank):
                rank.wire.send(saved)
        try:
            prune(save.place, order.keep)
        except CheckpointError as error:
            sys.stderr.write(f"step {save.step}: older checkpoints: {error}\n")

    def _decline(self, pending: _Pending) -> None:
        """Let whoever waits for the files of this machine know that they will not come."""
        save = pending.save
        problem = f"a rank ended before it had copied step {save.step}"
        if not self._commits:  # otherwise nothing was opened
            draft = save.draft()
            _wait_for(draft, save)
            for number in sorted(self._here):
                draft.leave(number, {"problem": problem})
        raise CheckpointError(problem)

    def _unname(self) -> None:
        """Nobody else will come: leave no socket behind, however this process ends."""
        with suppress(OSError):
            self._address.unlink()
            self._address.parent.rmdir()


def _commits(rank: _Rank) -> bool:
    return rank.hello is not None and rank.hello.commits


def _written(pending: _Pending, draft: Draft) -> dict[int, RankFile]:
    """Facts of the files of this machine's ranks, by rank."""

    def write(rank: _Rank, slot: int) -> tuple[int, RankFile]:
        assert rank.hello is not None, "a snapshot before hello"
        image, number = rank.images[slot], rank.hello.rank
        return number, draft.write(number, image.pieces, image.data)

    with ThreadPoolExecutor(WRITERS, "writer") as pool:
        under_way = [pool.submit(write, *each) for each in pending.slots.items()]
        return dict(future.result() for future in under_way)


def _wait_for(draft: Draft, save: Save) -> None:
    """Return when whoever commits has begun."""
    _until(lambda: draft.is_open() or None, f"step {save.step}", save.timeout_s, draft.look_s)


def _from_others(order: Commit, draft: Draft, mine: Collection[int]) -> list[RankFile]:
    """What agents of other machines left, once all is there."""
    found = []
    for rank in sorted(set(range(order.world_size)) - set(mine)):
        what = f"{rank_file_name(rank)} of another machine"
        left = partial(draft.left, rank)
        data = _until(left, what, order.save.timeout_s, draft.look_s)
        if "problem" in data:
            raise CheckpointError(f"rank {rank}: {data['problem']}")
        found.append(rank_file_from_json(data))
    return found


def _until(found: Callable[[], T | None], what: str, timeout_s: float, look_s: float) -> T:
    """What ``found`` finds, once it does. Raises CheckpointError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(look_s)
    return result
