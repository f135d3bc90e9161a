"""Saves of a run: most of them beside training, where an agent writes what ranks have copied.

Training waits for a copy into host memory. The last save of a run, and any where no agent can be
had, is written by the ranks themselves.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.agent.client import SLOTS, AgentClient, start_agent
from weft.checkpoint.agent.wire import Commit, Failed, Hello, Save
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import Place
from weft.checkpoint.shard import Shard
from weft.comm.heartbeat import with_heartbeat
from weft.platform.detect import free_memory_bytes
from weft.train.loop import Run
from weft.train.saving import save, shards_of, state_of, together

SHARE = 0.5
"""Of the memory that is free when the first copy is made, what all copies may take."""
LOST = "the process that writes checkpoints was ended from outside, and what it had is lost"
_END_S = 10.0


class Saver:
    """Saves the state of a run, one object a rank. Methods are collective but for ``close``.

    Args:
        root: The folder of checkpoints.
        logs: Where the agent writes what it complains of.
        fingerprint: Names the data.
        tell: Says something that is worth knowing, once on the main rank.
    """

    def __init__(
        self, run: Run, root: Place, logs: Path, *, fingerprint: str, tell: Callable[[str], None]
    ) -> None:
        self._run = run
        self._root = root.resolve() if isinstance(root, Path) else root
        self._logs = logs
        self._fingerprint = fingerprint
        self._tell = tell
        self._is_asynchronous = run.config.checkpoint.asynchronous
        self._agent: AgentClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._path = Path()

    def save(self, step: int, *, finite: bool) -> None:
        """Save the state after a step, and go on training as soon as it may change.

        Where the one before is still being written there is none, which is said.

        Raises:
            CheckpointError: as ``weft.train.saving.save``.
        """
        shards = shards_of(self._run.built)
        if not self._has_agent(shards):
            self._save_now(step, finite=finite)
            return
        assert self._agent is not None, "all ranks have one"
        is_late = self._agent.num_waiting == SLOTS
        mine = {"late": is_late, "name": secrets.token_hex(8)}
        everyone = self._run.comm.gather_json(mine, name="checkpoints under way")
        if any(each["late"] for each in everyone):
            self._tell(f"no checkpoint at step {step}: the two before it are still being written")
            return
        state = state_of(self._run, step, shards, fingerprint=self._fingerprint, finite=finite)
        limit_s = self._run.comm.timeout_s
        name = everyone[0]["name"]
        save = Save(root=str(self._root), step=step, name=name, timeout_s=limit_s)
        slot = self._copied(shards)
        if slot is None:
            self._save_now(step, finite=finite)
            return
        self._agent.write(slot, save)
        if self._run.is_main:
            order = Commit(
                save=save,
                world_size=self._run.comm.world_size,
                state=state,
                keep=self._run.config.checkpoint.keep,
            )
            self._agent.commit(order)

    def save_last(self, step: int, *, finite: bool) -> None:
        """Save the state after the last step, and return when it is on the disk.

        Raises:
            CheckpointError: as ``weft.train.saving.save``.
        """
        self.settle()
        self._save_now(step, finite=finite)

    def settle(self) -> None:
        """Wait until everything that was copied is written."""
        agents = self._run.comm.gather_json(self._agent is not None, name="agents")
        if any(agents):
            wait = self._agent.wait if self._agent is not None else lambda: None
            with_heartbeat(self._run.comm, wait, name="checkpoints under way")
        self.look()
        if self._agent is not None and not self._agent.is_alive:
            self._tell(LOST)

    def look(self) -> None:
        """Say what came of saves, as far as this rank has heard. Not collective."""
        for event in self._agent.events() if self._agent is not None else ():
            if isinstance(event, Failed):
                self._tell(f"no checkpoint at step {event.step}: {event.problem}")

    def close(self) -> None:
        """Let go of the agent. What it has it still writes, however this process ends."""
        ends_now = True
        if self._agent is not None:
            ends_now = not (self._agent.num_waiting and self._agent.is_alive)
            self._agent.close()
            self._agent = None
        if self._process is not None and ends_now:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                shutil.rmtree(self._path.parent, ignore_errors=True)  # if it was killed
        self._process = None

    def _save_now(self, step: int, *, finite: bool) -> None:
        save(self._run, self._root, step, fingerprint=self._fingerprint, finite=finite)

    def _copied(self, shards: Sequence[Shard]) -> int | None:
        """Where the agent finds this rank's state; None on all ranks where one could not copy."""
        agent = self._agent
        assert agent is not None, "all ranks have one"

        def copy() -> int:
            try:
                return agent.copy(shards)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy: {error}") from error

        try:
            return int(together(self._run.comm, copy)[self._run.comm.rank])
        except CheckpointError as error:
            self._give_up(str(error))
        return None

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
        self.close()
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
        nodes = [member.node for member in comm.members]
        here = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
        need = len(here) * SLOTS * sum(shard.tensor.nbytes for shard in shards)
        problem = ""
        if need > SHARE * free_memory_bytes():
            problem = f"copies of their state need {need / 2**30:.1f} GiB of host memory, "
            problem += f"more than {SHARE:.0%} of what is free"
        problems = comm.gather_json(problem, name="memory for copies")
        if any(problems):
            return str(next(filter(None, problems)))
        path = ""
        if comm.rank == here[0]:
            try:
                path = self._start()
            except OSError as error:
                problem = f"no process could be started for it: {error}"
        answers = comm.gather_json((path, problem), name="agents")
        if not any(why for _, why in answers):
            hello = Hello(rank=comm.rank, ranks_here=len(here), commits=self._run.is_main)
            try:
                self._agent = AgentClient(Path(answers[here[0]][0]), hello)
            except OSError as error:
                problem = f"it cannot be reached: {error}"
        problems = comm.gather_json(problem, name="agents")
        return str(next(filter(None, problems), ""))

    def _start(self) -> str:
        """The agent of this machine; where it answers."""
        log = self._logs / f"agent{self._run.comm.rank}.log"
        held = self._root if isinstance(self._root, Path) else self._logs.resolve()
        self._process, self._path = start_agent(log, held if self._run.is_main else None)
        return str(self._path)
