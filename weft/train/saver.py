"""Saves of a run: most of them beside training, where an agent writes what ranks have copied.

Training waits for a copy into host memory. The last save of a run, and any where no agent can be
had, is written by the ranks themselves. The newest copy stays in memory for whoever begins next.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType

from weft.checkpoint.agent.client import (
    SLOTS,
    AgentClient,
    ask_agent,
    start_agent,
)
from weft.checkpoint.agent.download import Download, Downloads
from weft.checkpoint.agent.lease import agent_address
from weft.checkpoint.agent.memory import ANSWER_S, MemoryOfMachine
from weft.checkpoint.agent.wire import (
    Commit,
    Failed,
    Hello,
    Open,
    Opened,
    Peer,
    Pushed,
    Save,
    Saved,
)
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import Place
from weft.checkpoint.remote.owner import Owner
from weft.checkpoint.shard import Shard
from weft.cluster.cluster import HOST
from weft.comm.address import host_for_others, own_host
from weft.comm.heartbeat import with_heartbeat
from weft.config.errors import DivergedError
from weft.platform.detect import free_memory_bytes
from weft.report.events import Kind
from weft.train.from_memory import new_start, node_of
from weft.train.loop import Run
from weft.train.saving import other_writer, save, shards_of, state_of, together

SHARE = 0.5
"""Of the memory that is free when the first copy is made, what all copies may take."""
LOST = "the process that writes checkpoints was ended from outside, and what it had is lost"
_END_S = 10.0
TOLD_S = 60.0
"""From one event that tells of copies to the next."""


@dataclass(slots=True)
class _Copy:
    """One that has begun on all ranks, and may end while they train."""

    step: int
    is_written: bool
    stall_s: float
    """For which training waited until it went on."""
    download: Download | None
    """What is under way of this rank's."""
    is_told: bool = False


class Saver:
    """Saves the state of a run, one object a rank. Methods are collective but for ``close``.

    Args:
        root: The folder of checkpoints.
        logs: Where the agent writes what it complains of.
        owner: This start of the run, for storage far away; the main rank's counts.
        fingerprint: Names the data.
        tell: Says something that is worth knowing, once on the main rank.
    """

    def __init__(
        self,
        run: Run,
        root: Place,
        logs: Path,
        *,
        owner: Owner,
        fingerprint: str,
        tell: Callable[[str], None],
    ) -> None:
        self._run = run
        self._root = root.resolve() if isinstance(root, Path) else root
        self._held = self._root if isinstance(self._root, Path) else logs.resolve()
        self._logs = logs
        self._owner = owner
        self._fingerprint = fingerprint
        self._start = new_start()
        self._tell = tell
        self._is_asynchronous = run.config.checkpoint.asynchronous
        self._slots = SLOTS + bool(run.config.checkpoint.snapshot_every)
        self._agent: AgentClient | None = None
        """All ranks have one, or none has."""
        self._newest: int | None = None
        """The step of the newest copy."""
        self._stalls: list[float] = []
        """Seconds of copies that no event tells of yet."""
        self._told = -inf
        """When one last did, by ``time.monotonic``."""
        device = run.comm.device
        self._downloads = None if device.type == HOST else Downloads(device)
        self._copy: _Copy | None = None
        """Only where some rank of the job computes on a device: training goes on beside it."""
        self._is_alone = False
        """Nobody but these ranks writes checkpoints."""
        nodes = [member.node for member in run.comm.members]
        self._here = [rank for rank, node in enumerate(nodes) if node == nodes[run.comm.rank]]

    def save(self, step: int, *, finite: bool) -> None:
        """Save the state after a step, and go on training as soon as it may change.

        Where the one before is still being written there is none, which is said.

        Raises:
            CheckpointError: as ``weft.train.saving.save``.
        """
        if not self._took(step, finite=finite, is_written=True):
            self._save(step, finite=finite)

    def snapshot(self, step: int, *, finite: bool) -> None:
        """Keep the state after a step in memory; nothing happens where no agent can be had."""
        self._took(step, finite=finite, is_written=False)

    def keep(self, step: int, *, finite: bool) -> bool:
        """Whether the state after a step is where the next epoch of the job finds it: in memory,
        or on the disk where no agent can be had."""
        self._end_copy()
        if self._newest == step:
            return True
        if self._took(step, finite=finite, is_written=False):
            self._end_copy()
            return self._newest == step
        try:
            self._save(step, finite=finite)
        except CheckpointError as error:
            self._tell(f"no other plan yet, for the state at step {step} is not kept: {error}")
            return False
        return True

    def _took(self, step: int, *, finite: bool, is_written: bool) -> bool:
        """Whether agents care for this save; where they have no place for it, that is said."""
        self._end_copy()
        started, shards = time.perf_counter(), shards_of(self._run.built)
        if not self._has_agent(shards):
            return False
        agent, comm = self._agent, self._run.comm
        assert agent is not None, "all ranks have one"
        name, is_written = self._place(agent, step, is_written=is_written)
        if not name:
            return True
        looked_at = shards if is_written else ()
        state = state_of(self._run, step, looked_at, fingerprint=self._fingerprint, finite=finite)
        save = Save(
            root=str(self._root),
            step=step,
            name=name,
            timeout_s=comm.timeout_s,
            is_written=is_written,
        )
        said = state if comm.rank == self._here[0] else None

        def hand_over(slot: int) -> None:
            agent.hand_over(slot, save, world_size=comm.world_size, state=said)
            if self._run.is_main and is_written:
                keep = self._run.config.checkpoint.keep
                agent.commit(Commit(save=save, keep=keep, owner=self._owner))

        begun = self._begun(shards, hand_over)
        if begun is None:
            return False
        if isinstance(begun, int):
            hand_over(begun)
        self._newest, stall_s = step, time.perf_counter() - started
        if self._run.waits_for_reads:
            download = None if isinstance(begun, int) else begun
            self._copy = _Copy(step, is_written, stall_s, download)
        else:
            self._note_copy(step, stall_s, is_written=is_written)
        return True

    def _begun(
        self, shards: Sequence[Shard], hand_over: Callable[[int], None]
    ) -> int | Download | None:
        """Where the agent finds this rank's state; or what brings it there while training goes on,
        and hands it over. None on all ranks where one could not copy."""
        agent, downloads = self._agent, self._downloads
        assert agent is not None, "all ranks have one"
        begun: list[int | Download] = []

        def begin() -> None:
            try:
                if downloads is None:
                    begun.append(agent.copy(shards))
                    return
                self._run.built.gradients.settle()
                download = agent.begin(shards, downloads, hand_over)
                self._run.built.engine.still_read.until(download.has_read)
                begun.append(download)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy: {error}") from error

        try:
            together(self._run.comm, begin)
        except CheckpointError as error:
            futures.wait([each.arrives for each in begun if isinstance(each, Download)], _END_S)
            self._give_up(str(error))
            return None
        return begun[0]

    def _end_copy(self) -> None:
        """Wait until all ranks have copied what they began to. Collective."""
        copy = self._copy
        if copy is None:
            return
        started = time.perf_counter()

        def end() -> None:
            try:
                if copy.download is not None:
                    copy.download.arrives.result()
            except OSError as error:
                raise CheckpointError(f"no memory for a copy: {error}") from error

        try:
            together(self._run.comm, end)
        except CheckpointError as error:
            self._newest = None
            self._give_up(str(error))
        copy.stall_s += time.perf_counter() - started
        self._tell_copy(copy)
        self._copy = None

    def _tell_copy(self, copy: _Copy) -> None:
        """With what training waited for it: this thread, and the device before its next update."""
        if not copy.is_told:
            copy.is_told = True
            stall_s = copy.stall_s + self._run.built.engine.still_read.waited_s()
            self._note_copy(copy.step, stall_s, is_written=copy.is_written)

    def _note_copy(self, step: int, stall_s: float, *, is_written: bool) -> None:
        """Every save is an event; copies alone are one a minute, for there may be one a step."""
        self._stalls.append(stall_s)
        if is_written or time.monotonic() >= self._told + TOLD_S:
            self._tell_copies("save_begun" if is_written else "snapshot", step)

    def _tell_copies(self, kind: Kind, step: int) -> None:
        """Those that no event tells of yet; ``step``: of the last one."""
        copied = f"copied the state after step {step} in {self._stalls[-1]:.3g} s"
        facts = {"stall_s": sum(self._stalls), "copies": len(self._stalls)}
        self._run.events.write(kind, copied, step=step, facts=facts)
        self._stalls.clear()
        self._told = time.monotonic()

    def _tell_rest(self) -> None:
        """Nothing is to come that would tell of copies."""
        if self._copy is not None and self._has_arrived:
            self._tell_copy(self._copy)
        if self._stalls and self._newest is not None:
            self._tell_copies("snapshot", self._newest)

    def _place(self, agent: AgentClient, step: int, *, is_written: bool) -> tuple[str, bool]:
        """A name for a save, empty where some rank has no place for it; and whether it is written.
        What cannot be is said."""
        name = self._start + secrets.token_hex(8)
        mine = (agent.has_room, agent.num_waiting, name, agent.is_on_its_way)
        everyone = self._run.comm.gather_json(mine, name="checkpoints under way")
        if any(each[3] for each in everyone):
            before = "the one before is still on its way to another machine"
            what = ("copy", "checkpoint")[is_written]
            self._say("save_skipped", step, f"no {what} at step {step}: {before}")
            return "", False
        has_room = all(each[0] for each in everyone)
        # With snapshots two places are for them: one is written at a time.
        is_late = self._slots > SLOTS and any(each[1] for each in everyone)
        if is_written and (is_late or not has_room):
            before = "one before it is" if is_late else "two before it are"
            said = f"no checkpoint at step {step}: the {before} still being written"
            self._say("save_skipped", step, said)
        return everyone[0][2] if has_room else "", is_written and not is_late

    def save_last(self, step: int, *, finite: bool) -> None:
        """Save the state after the last step, and return when it is on the disk.

        Raises:
            CheckpointError: as ``weft.train.saving.save``.
        """
        started = time.perf_counter()
        self.settle()
        self._save(step, finite=finite, waited_s=time.perf_counter() - started)

    def _save(self, step: int, *, finite: bool, waited_s: float = 0.0) -> None:
        """By the ranks themselves, once no agent writes that none of them speaks to: a run that
        goes on from memory did not wait for it, or they gave it up."""
        started, events = time.perf_counter(), self._run.events
        if self._agent is None and not self._is_alone:
            problem = other_writer(self._run.comm, self._held, self._root)
            if problem:
                raise CheckpointError(problem)
            self._is_alone = True
        events.write("save_begun", f"writing a checkpoint of step {step}", step=step)
        save(
            self._run,
            self._root,
            step,
            fingerprint=self._fingerprint,
            finite=finite,
            owner=self._owner,
        )
        seconds = time.perf_counter() - started
        facts = {"seconds": seconds, "stall_s": waited_s + seconds}
        events.write("save_finished", f"saved step {step}", step=step, facts=facts)

    def _say(self, kind: Kind, step: int, text: str) -> None:
        """To whoever looks on, and to whoever looks later."""
        self._tell(text)
        self._run.events.write(kind, text, step=step)

    @property
    def _has_arrived(self) -> bool:
        """What this rank copies."""
        download = None if self._copy is None else self._copy.download
        return download is None or download.arrives.done()

    def settle(self) -> None:
        """Wait until everything that was copied is written."""
        self._end_copy()
        self._tell_rest()
        agents = self._run.comm.gather_json(self._agent is not None, name="agents")
        if any(agents):
            wait = self._agent.wait if self._agent is not None else lambda: None
            with_heartbeat(self._run.comm, wait, name="checkpoints under way")
        self.look()
        if self._agent is not None and not self._agent.is_alive:
            self._tell(LOST)

    def look(self) -> None:
        """Say what came of saves, as far as this rank has heard. Not collective."""
        if self._copy is not None and not self._copy.is_told and self._has_arrived:
            if not self._run.built.engine.still_read.is_known:
                return  # nobody hears of its end before it was told
            self._tell_copy(self._copy)
        for event in self._agent.events() if self._agent is not None else ():
            if isinstance(event, Failed):
                said = f"no checkpoint at step {event.step}: {event.problem}"
                self._say("save_failed", event.step, said)
            elif isinstance(event, Saved):
                facts = {"seconds": event.seconds, "bytes": event.bytes}
                said = f"saved step {event.step}"
                self._run.events.write("save_finished", said, step=event.step, facts=facts)
            elif isinstance(event, Pushed):
                self._tell(f"no other machine has the newest copy: {event.problem}")

    def leave(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        """Let go of the agent at the end of a run; after an error, and for another plan, it keeps
        what is in memory for the next start, but for a run that has diverged."""
        self._tell_rest()
        failed = kind is not None and not issubclass(kind, DivergedError)
        self.close(keeps=failed or self._run.abort.left)
        if self._downloads is not None:
            self._downloads.close()

    def close(self, *, keeps: bool = False) -> None:
        """Let go of the agent. What it has it still writes, however this process ends.

        ``keeps``: the newest copy stays in memory.
        """
        agent, self._agent, lease = self._agent, None, self._run.lease
        if self._copy is not None and self._copy.download is not None:
            futures.wait([self._copy.download.arrives], _END_S)  # a device may be stuck
        if not keeps:
            lease.let_go()
        if agent is None:
            return
        ends_now = not (agent.num_waiting and agent.is_alive)
        if not keeps:
            agent.forget()
        agent.close()
        if lease.process is not None and ends_now and not keeps:
            with suppress(subprocess.TimeoutExpired):
                lease.process.wait(_END_S)
                lease.process = None

    def _give_up(self, why: str) -> None:
        """All ranks go on without agents."""
        self._tell(f"checkpoints are written by the ranks themselves: {why}")
        self._is_asynchronous = False
        self.close()

    def _has_agent(self, shards: Sequence[Shard]) -> bool:
        """All ranks have an agent, which is started for the first save. Collective."""
        if not self._is_asynchronous:
            return False
        agent = self._agent
        alive = agent is not None and agent.is_alive
        never = agent is not None and not agent.is_alive and not agent.has_written
        everyone = self._run.comm.gather_json((alive, never), name="agents")
        if all(is_alive for is_alive, _ in everyone):
            return True
        if agent is not None:
            self._tell(LOST)
        self.close(keeps=True)
        if any(is_never for _, is_never in everyone):
            self._give_up(f"the process that should ended at once; see {self._logs}/agent*.log")
            return False
        problem = self._problem(shards)
        if problem:
            self._give_up(problem)
        return self._is_asynchronous

    def _problem(self, shards: Sequence[Shard]) -> str:
        """Start an agent on every machine and speak to it; why some rank cannot, or nothing."""
        comm = self._run.comm
        mine = sum(shard.tensor.nbytes for shard in shards)
        of_ranks = comm.gather_json(mine, name="memory for copies")
        here = [int(of_ranks[rank]) for rank in self._here]
        need = self._slots * sum(here)
        if self._downloads is not None:
            need += sum(map(self._downloads.bytes_for, here))
        problem, free = "", free_memory_bytes()
        if need > SHARE * free:  # new copies take the place of those that a start before left
            with MemoryOfMachine(self._held, node_of(comm)) as memory:
                free += memory.num_bytes
        if need > SHARE * free:
            problem = f"copies of their state need {need / 2**30:.1f} GiB of host memory, "
            problem += f"more than {SHARE:.0%} of what is free"
        problems = comm.gather_json(problem, name="memory for copies")
        if any(problems):
            return str(next(filter(None, problems)))
        path, was_here = "", False
        if comm.rank == self._here[0]:
            try:
                path, was_here = self._found()
            except OSError as error:
                problem = f"no process could be started for it: {error}"
        answers = comm.gather_json((path, was_here, secrets.token_hex(32), problem), name="agents")
        if not any(why for *_, why in answers):
            path, was_here, crew, _ = answers[self._here[0]]
            pushes = self._pair(Path(path), answers[0][2])
            problem = self._join(Path(path), crew, was_here=was_here, pushes=pushes)
        problems = comm.gather_json(problem, name="agents")
        return str(next(filter(None, problems), ""))

    def _pair(self, path: Path, secret: str) -> bool:
        """Let the agent put copies into the next machine's memory, if asked; whether it does."""
        comm = self._run.comm
        if not self._run.config.checkpoint.peers:
            return False
        is_first, port = comm.rank == self._here[0], 0
        host = host_for_others(comm.gather_json(own_host(), name="hosts of machines"))
        if is_first:
            port = self._port(path, Open(secret=secret, host=host))
        mine = (host, port) if is_first else None
        everyone = comm.gather_json(mine, name="memory of machines")
        machines = [rank for rank, address in enumerate(everyone) if address]
        if len(machines) == 1 or not all(everyone[rank][1] for rank in machines):
            why = "there is no other" if len(machines) == 1 else "one cannot be reached"
            self._tell(f"no copies go to another machine (checkpoint.peers): {why}")
            return False
        if is_first:
            after = machines[(machines.index(comm.rank) + 1) % len(machines)]
            host, port = everyone[after]
            self._port(path, Peer(host=host, port=port, secret=secret))
        comm.barrier(name="memory of machines")
        return True

    def _port(self, path: Path, message: Open | Peer) -> int:
        """What the agent answers; 0 where it does not."""
        answer = ask_agent(path, message, min(ANSWER_S, self._run.comm.timeout_s / 2))
        return answer.port if isinstance(answer, Opened) else 0

    def _join(self, path: Path, crew: str, *, was_here: bool, pushes: bool) -> str:
        """Speak to an agent; why not, or nothing."""
        hello = Hello(
            rank=self._run.comm.rank,
            ranks_here=len(self._here),
            commits=self._run.is_main,
            crew=crew,
            pushes=pushes,
        )
        try:
            self._agent = AgentClient(path, hello, slots=self._slots)
            self._run.lease.take(path)
        except OSError as error:
            return f"it cannot be reached: {error}"
        self._agent.has_written, self._is_alone = was_here, False
        return ""

    def _found(self) -> tuple[str, bool]:
        """Where the agent of this machine answers, and whether it was here before."""
        node, lease = node_of(self._run.comm), self._run.lease
        self._held.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            lease.take(agent_address(self._held, node))
            with MemoryOfMachine(self._held, node) as memory:
                if memory.offers:  # so it stays, as somebody holds on to it
                    return str(agent_address(self._held, node)), True
        if lease.process is not None:
            lease.process.poll()  # it may have been killed
        log = self._logs / f"agent{self._run.comm.rank}.log"
        keep_s = self._run.config.checkpoint.memory_s
        lease.process, path = start_agent(
            log, self._held, node=node, commits=self._run.is_main, keep_s=keep_s
        )
        return str(path), False
