"""The agent of one machine: it writes what ranks have copied, and outlives them until it is done.

Ranks that are killed while it writes change nothing: what all of them copied becomes a checkpoint,
what only some copied is discarded, and the checkpoint before it stays. Agents of several machines
meet in the folder that they write into: the one beside the first rank opens it, the others say that
they have all copies, put the facts of their files beside those, and it commits.

The newest state that all copied stays in memory, written or not, and whoever begins next may go on
from it: for as long as anyone holds on to the agent, and a while after.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.checkpoint.agent.holding import Holding, Patience, speaks
from weft.checkpoint.agent.image import Image, opened_image
from weft.checkpoint.agent.kept import Kept, KeptCopy, Memory
from weft.checkpoint.agent.peers import PeerServer, put
from weft.checkpoint.agent.wire import (
    Ask,
    Commit,
    Failed,
    Fetch,
    Forget,
    Hello,
    Message,
    Offers,
    Open,
    Opened,
    Peer,
    Pushed,
    Save,
    Saved,
    Settle,
    Settled,
    Snapshot,
    Taking,
    Wire,
    Written,
)
from weft.checkpoint.agent.wire import Memory as NewMemory
from weft.checkpoint.draft import Draft
from weft.checkpoint.entry import JSON, CheckpointError, RankFile, rank_file_name
from weft.checkpoint.index import rank_file_from_json, rank_file_json
from weft.checkpoint.store import prune, step_name

FIRST_RANK_S = 120.0
"""An agent that nobody speaks to ends after so long."""
WRITERS = 4
"""Files that are written at the same time."""

T = TypeVar("T")


@dataclass(eq=False)
class _Crew:
    """Ranks of this machine that began together."""

    name: str
    size: int
    commits: bool = False
    """One of them says when to commit."""
    here: set[int] = field(default_factory=set)
    """Those who have come, some of whom may be gone by now."""
    ranks: list[_Rank] = field(default_factory=list)
    """Those who are still here."""


@dataclass(eq=False)
class _Rank:
    """One that speaks to this agent."""

    wire: Wire
    hello: Hello | None = None
    crew: _Crew | None = None
    images: dict[int, Image] = field(default_factory=dict)
    asks: bool = False


@dataclass(eq=False)
class _Pending:
    """A save of which something came."""

    save: Save
    crew: _Crew
    snapshots: dict[_Rank, Snapshot] = field(default_factory=dict)
    order: Commit | None = None
    kept: Kept | None = None
    """All ranks of the crew have copied."""
    holding: Holding | None = None
    """Another machine's agent commits, and hears so."""


class Agent:
    """Speaks to the ranks of one machine until they and its work have ended."""

    def __init__(
        self, listener: socket.socket, address: Path, parent: int, *, root: int, keep_s: float
    ) -> None:
        """``parent``: process id of the rank that started it. ``root``: the open folder of
        checkpoints, locked. ``keep_s``: how long memory stays after the last rank has gone."""
        self._listener = listener
        self._address = address
        self._inode = address.stat().st_ino
        self._select = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._pending: dict[str, _Pending] = {}
        self._crews: dict[str, _Crew] = {}
        self._came_at: dict[str, float] = {}
        """When the first rank of each crew did."""
        self._memory = Memory()
        self._latest = ""
        self._asked: list[tuple[_Rank, Message]] = []
        self._jobs = ThreadPoolExecutor(1, "persist")
        self._pushes = ThreadPoolExecutor(1, "push")
        self._server: PeerServer | None = None
        self._peer: Peer | None = None
        self._before: Draft | None = None
        """What this machine had its part in last, where another one's agent commits."""
        self._working = 0
        self._parent = parent
        self._root, self._is_locked = root, True
        self._keep_s = keep_s
        self._done, self._tell = socket.socketpair()

    def serve(self) -> None:
        """Return when everything is written or discarded, and nobody wants what is in memory."""
        self._listener.setblocking(False)
        self._select.register(self._listener, selectors.EVENT_READ)
        self._select.register(self._done, selectors.EVENT_READ)
        stays_until = time.monotonic() + FIRST_RANK_S
        while self._is_needed() or time.monotonic() < stays_until:
            timeout_s = 0.0 if self._asked else 1.0
            ready = [key.fileobj for key, _ in self._select.select(timeout_s)]
            # Who has come is known before anybody is heard: ranks may all be gone by now.
            for source in sorted(ready, key=lambda source: source is not self._listener):
                self._heard(source)
            if not ready:
                self._answer()
            stays_until = self._stays(stays_until)
            self._lock(self._is_writing() or not self._crews)
        self._jobs.shutdown()
        self._pushes.shutdown()
        self._unname()

    def _stays(self, until: float) -> float:
        """Until when it does if nobody needs it; ``until``: as was known before."""
        if self._is_needed():
            return time.monotonic() + self._keep_s
        if self._crews and not self._memory:
            return 0.0
        if not (self._crews or self._ranks) and os.getppid() != self._parent:
            return 0.0  # nobody else will come
        return until

    def _is_writing(self) -> bool:
        """It may write into the folder of checkpoints at any moment."""
        return any(rank.crew for rank in self._ranks) or bool(self._working)

    def _is_needed(self) -> bool:
        """Somebody speaks to it, or holds on to what it has."""
        speaks = any(rank.asks for rank in self._ranks)
        speaks = speaks or (self._server is not None and self._server.is_busy)
        return self._is_writing() or speaks or bool(self._ranks and self._memory)

    def _lock(self, locked: bool) -> None:
        """Let others know whether somebody writes into the folder of checkpoints."""
        if locked != self._is_locked:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._root, fcntl.LOCK_SH if locked else fcntl.LOCK_UN)
            self._is_locked = locked

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
                self._join(rank, message)
            case NewMemory():
                image = opened_image(rank.wire.take_file(), message.pieces_bytes)
                rank.images[message.slot] = image
            case Taking():
                assert rank.crew is not None, "a copy before hello"
                self._memory.begins(rank.crew.name, rank.images.get(message.slot))
            case Snapshot():
                pending = self._of(rank, message.save)
                pending.snapshots[rank] = message
                self._look_at(pending)
            case Commit():
                pending = self._of(rank, message.save)
                pending.order = message
                self._look_at(pending)
            case Forget():
                self._memory.forget()
            case Peer():
                self._peer = message
                rank.wire.send(Opened(port=message.port))
            case Ask() | Fetch() | Settle() | Open():
                rank.asks = True
                self._asked.append((rank, message))
            case _:
                raise AssertionError(f"a rank said {message}")

    def _join(self, rank: _Rank, hello: Hello) -> None:
        crew = self._crews.setdefault(hello.crew, _Crew(hello.crew, hello.ranks_here))
        self._came_at.setdefault(hello.crew, time.monotonic())
        crew.here.add(hello.rank)
        crew.ranks.append(rank)
        crew.commits |= hello.commits
        rank.hello, rank.crew = hello, crew
        if not hello.pushes:
            self._peer = None

    def _answer(self) -> None:
        """Whoever asked, once all that was said before is heard: by ranks that are gone, too."""
        asked, self._asked = self._asked, []
        for rank, message in asked:
            match message:
                case Ask():
                    memory = self._memory
                    rank.wire.send(
                        Offers(
                            offers=memory.offers(), latest=self._latest, num_bytes=memory.num_bytes
                        )
                    )
                case Fetch():
                    self._memory.hand_over(message.name, rank.wire)
                case Open():
                    rank.wire.send(Opened(port=self._opened(message)))
                case Settle():
                    self._work(partial(rank.wire.send, Settled()))

    def _opened(self, message: Open) -> int:
        """The port at which other machines are answered from now on; 0 where that cannot be."""
        if self._server is not None:
            self._server.close()
        try:
            self._server = PeerServer(message.host, message.secret, self._memory)
        except OSError as error:
            sys.stderr.write(f"{message.host}: {error}\n")
            return 0
        return self._server.port

    def _push(self, kept: Kept, ranks: Sequence[_Rank], peer: Peer) -> None:
        """Put a copy into another machine's memory; none of its images changes meanwhile."""
        save, problem = kept.save, ""
        facts = {"name": save.name, "step": save.step}
        facts |= {"world_size": kept.world_size, "state": kept.state}
        try:
            for rank, copy in kept.copies.items():
                mine = {**facts, "rank": rank, "is_last": rank == max(kept.copies)}
                put((peer.host, peer.port), peer.secret, mine, copy.image, copy.guard)
        except CheckpointError as error:
            problem = str(error)
        for each in ranks:
            each.wire.send(Pushed(problem=problem))

    def _of(self, rank: _Rank, save: Save) -> _Pending:
        assert rank.crew is not None, "a save before hello"
        return self._pending.setdefault(save.name, _Pending(save, rank.crew))

    def _look_at(self, pending: _Pending) -> None:
        """Keep what is complete, begin to write it, and give up what never will be."""
        crew, save = pending.crew, pending.save
        if pending.kept is None and len(pending.snapshots) == crew.size:
            self._keep(pending, _kept(pending))
        is_complete = pending.kept is not None
        if not save.is_written:
            if is_complete or _is_lost(pending):
                del self._pending[save.name]
            return
        if is_complete and (pending.order is not None or not crew.commits):
            work = self._persist
        elif _is_lost(pending):
            work = self._decline
        else:
            return
        del self._pending[save.name]
        self._begin(pending, partial(work, pending))

    def _keep(self, pending: _Pending, kept: Kept) -> None:
        """All ranks have copied."""
        pending.kept = kept
        self._memory.add(kept)
        if self._peer is not None:
            ranks = list(pending.snapshots)
            self._work(partial(self._push, kept, ranks, self._peer), self._pushes)
        if pending.save.is_written and not pending.crew.commits:
            pending.holding = Holding(pending.save.draft, min(kept.copies))

    def _begin(self, pending: _Pending, work: Callable[[], None]) -> None:
        def job() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told to whoever asked, and written down
                sys.stderr.write(f"step {pending.save.step}: {type(error).__name__}: {error}\n")
                sys.stderr.flush()
                for rank in pending.snapshots:
                    rank.wire.send(Failed(step=pending.save.step, problem=str(error)))
            finally:
                if pending.holding is not None:
                    pending.holding.end()
                for rank, snapshot in pending.snapshots.items():
                    rank.wire.send(Written(slot=snapshot.slot))

        self._work(job)

    def _work(self, job: Callable[[], None], where: ThreadPoolExecutor | None = None) -> None:
        """One thing after the other, beside what is said meanwhile."""

        def work() -> None:
            try:
                job()
            finally:
                self._tell.send(b".")

        self._working += 1
        (where or self._jobs).submit(work)

    def _left(self, gone: _Rank) -> None:
        """A rank ended, or was killed: what it did not copy any more is discarded."""
        self._select.unregister(gone.wire)
        gone.wire.close()
        self._ranks.remove(gone)
        if gone.crew is not None:
            gone.crew.ranks.remove(gone)
        for pending in list(self._pending.values()):
            self._look_at(pending)

    def _persist(self, pending: _Pending) -> None:
        """Write the files of this machine; commit them with those of the others, or leave facts."""
        save, order = pending.save, pending.order
        draft = save.draft(order.owner if order else None)
        if order is None:
            self._contribute(draft, pending)
            return
        assert pending.kept is not None, "written before it is whole"
        others = set(range(pending.kept.world_size)) - pending.kept.copies.keys()
        began = time.monotonic()
        try:
            draft.begin()
            mine = _written(pending, draft)
            files = [*mine.values(), *self._from_others(draft, pending, others)]
            draft.commit(files, pending.kept.state)
            self._latest = step_name(save.step)
        except Exception:
            draft.abandon(tells=bool(others))
            raise
        num_bytes = sum(facts.bytes for facts in files)
        saved = Saved(step=save.step, seconds=time.monotonic() - began, bytes=num_bytes)
        for rank in pending.snapshots:
            if _commits(rank):
                rank.wire.send(saved)
        try:
            prune(save.place, order.keep)
        except CheckpointError as error:
            sys.stderr.write(f"step {save.step}: older checkpoints: {error}\n")

    def _contribute(self, draft: Draft, pending: _Pending) -> None:
        """Write the files of this machine, and let whoever commits know what became of them."""
        assert pending.kept is not None, "written before it is whole"
        self._wait_for(draft, pending)
        try:
            left = {rank: rank_file_json(f) for rank, f in _written(pending, draft).items()}
        except Exception as error:
            problem = {"problem": str(error)}
            _leave(draft, pending, dict.fromkeys(pending.kept.copies, problem))
            raise
        _leave(draft, pending, left)

    def _decline(self, pending: _Pending) -> None:
        """Let whoever waits for the files of this machine know that they will not come."""
        save = pending.save
        problem = f"a rank ended before it had copied step {save.step}"
        if not pending.crew.commits:  # otherwise nothing was opened
            draft = save.draft()
            self._wait_for(draft, pending)
            ranks = sorted(pending.crew.here)
            _leave(draft, pending, {rank: {"problem": problem} for rank in ranks})
        raise CheckpointError(problem)

    def _wait_for(self, draft: Draft, pending: _Pending) -> None:
        """Return when whoever commits has begun."""
        before, self._before = self._before, draft

        def is_at_work() -> bool:
            """With the save before; otherwise it begins this one at once, or never."""
            return before is not None and before.is_open()

        def has_begun() -> bool | None:
            if draft.is_abandoned():
                raise CheckpointError("who commits it gave it up")
            return draft.is_open() or None

        what, patience = f"step {pending.save.step}", Patience(is_at_work)
        self._until(has_begun, what, pending, draft.look_s, patience)

    def _from_others(
        self, draft: Draft, pending: _Pending, ranks: Collection[int]
    ) -> list[RankFile]:
        """What agents of other machines left, once all is there."""
        found = []
        for rank in sorted(ranks):
            what = f"{rank_file_name(rank)} of another machine"
            patience = Patience(speaks(draft, rank))
            data = self._until(partial(draft.left, rank), what, pending, draft.look_s, patience)
            if "problem" in data:
                raise CheckpointError(f"rank {rank}: {data['problem']}")
            found.append(rank_file_from_json(data))
        return found

    def _until(
        self,
        found: Callable[[], T | None],
        what: str,
        pending: _Pending,
        look_s: float,
        patience: Patience,
    ) -> T:
        """What ``found`` finds, once it does. Raises CheckpointError where that takes too long, or
        where the job has gone on without those ranks and nobody is seen to work on it."""
        timeout_s = (pending.order or pending).save.timeout_s
        deadline = time.monotonic() + timeout_s
        while (result := found()) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"waited {timeout_s:.0f} s for {what}")
            others_at = self._others_since(pending.crew)
            if others_at is not None and patience.has_ended(others_at):
                raise CheckpointError(f"ranks were lost before {what} came")
            time.sleep(look_s)
        return result

    def _others_since(self, crew: _Crew) -> float | None:
        """When the ranks came that took the places of those; None: nobody has."""
        newest = next(reversed(list(self._came_at)))
        return None if newest == crew.name else self._came_at[newest]

    def _unname(self) -> None:
        """Leave no socket behind, unless another agent has put its own there."""
        with suppress(OSError):
            if self._address.stat().st_ino == self._inode:
                self._address.unlink()


def _is_lost(pending: _Pending) -> bool:
    """Somebody who has gone had something to say of it."""
    crew = pending.crew
    if not crew.ranks:
        return True
    to_come = sum(rank not in pending.snapshots for rank in crew.ranks)
    has_come = len(crew.here) == crew.size
    lacks_order = crew.commits and pending.order is None and pending.save.is_written
    return has_come and (
        len(pending.snapshots) + to_come < crew.size
        or (lacks_order and not any(map(_commits, crew.ranks)))
    )


def _kept(pending: _Pending) -> Kept:
    copies, states = {}, []
    for rank, snapshot in pending.snapshots.items():
        assert rank.hello is not None, "a snapshot before hello"
        copies[rank.hello.rank] = KeptCopy(rank.images[snapshot.slot], snapshot.guard)
        states += [] if snapshot.state is None else [snapshot.state]
        world_size = snapshot.world_size
    crew = pending.crew.name
    return Kept(pending.save, crew, world_size, states[0], dict(sorted(copies.items())))


def _commits(rank: _Rank) -> bool:
    return rank.hello is not None and rank.hello.commits


def _leave(draft: Draft, pending: _Pending, facts: Mapping[int, Mapping[str, JSON]]) -> None:
    """``facts``: by rank, what whoever commits has to know."""
    if pending.holding is not None:
        pending.holding.end()
    for rank, each in facts.items():
        draft.leave(rank, each)


def _written(pending: _Pending, draft: Draft) -> dict[int, RankFile]:
    """Facts of the files of this machine's ranks, by rank."""
    assert pending.kept is not None, "written before it is whole"

    def write(rank: int, image: Image) -> tuple[int, RankFile]:
        return rank, draft.write(rank, image.pieces, image.data)

    with ThreadPoolExecutor(WRITERS, "writer") as pool:
        copies = pending.kept.copies.items()
        under_way = [pool.submit(write, rank, copy.image) for rank, copy in copies]
        return dict(future.result() for future in under_way)
