"""What goes wrong, when, in which rank; and how it is made to.

A fault is appointed before a run begins. The rank that it names looks at its appointments wherever
something happens to training, and does to itself, to its machine's agent or to all processes what
it says: once, whatever process is that rank then.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from weft.checkpoint.agent.client import AgentClient
from weft.checkpoint.store import read_latest
from weft.parallel.gradients import Gradients
from weft.train import loop, running
from weft.train.engine import Engine
from weft.train.loop import Run
from weft.train.worker import RankLife

Kind = Literal["kill", "stop", "cut", "slow", "clock", "agent", "full", "all", "flip", "truncate"]
"""A rank is killed, or stops to answer; its connections are cut, or carry nothing for a while; its
clock is a day off; the agent is killed, or may write no more; every process is killed, or that and
what was saved last is damaged, in one bit or at its end."""
During = Literal["forward", "backward", "reduction", "update", "snapshot", "handed over", "commit"]
"""Moments of a step; the last three of them of a copy for the agent and of its order to commit."""
Starting = Literal["join", "agree", "build", "restore"]
"""Moments of a start that follows another fault."""

ALL_KINDS: tuple[Kind, ...] = ("kill", "kill", "kill", "kill", *get_args(Kind))
"""As often as they are drawn."""
FOLDER, FIRED, STEPS = "faults.json", "fired", "steps"
SLOW_S = 0.5
FULL_STEPS = 3
"""Steps for which the agent may not write."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One appointment."""

    number: int
    kind: Kind
    moment: During | Starting
    rank: int
    step: int = 0
    """In which it happens, or in the next one that has such a moment, of those during a step."""
    after: int = -1
    """The number of the fault whose recovery it disturbs, of those in a start."""

    @property
    def restarts(self) -> bool:
        """Ranks begin again."""
        return self.kind in ("kill", "stop", "cut", "all", "flip", "truncate")

    @property
    def forgets(self) -> bool:
        """What was in memory is lost with it."""
        return self.kind in ("agent", "flip", "truncate")

    @property
    def ends_all(self) -> bool:
        """A person has to start the command again."""
        return self.kind in ("all", "flip", "truncate")


def drawn(
    seed: int, count: int, *, ranks: int, every: int, kinds: Sequence[Kind] = ALL_KINDS
) -> list[Fault]:
    """Faults, ``every`` so many steps or a few more; some disturb the recovery from another."""
    dice = random.Random(seed)
    found: list[Fault] = []
    while len(found) < count:
        last = found[-1] if found else None
        step = (last.step if last else 0) + every + dice.randrange(4)
        kind, rank = dice.choice(kinds), dice.randrange(ranks)
        moment = dice.choice(get_args(During))
        if last is not None and last.restarts and last.after < 0 and dice.random() < 0.4:
            start = dice.choice(get_args(Starting))
            found.append(Fault(len(found), "kill", start, rank, last.step, last.number))
            continue
        if kind in ("agent", "full", "all", "flip", "truncate") or moment == "commit":
            rank = 0  # beside the agent that commits, and the one that a person looks at
        found.append(Fault(len(found), kind, moment, rank, step))
    return found


@dataclass
class Appointments:
    """What is to happen in one rank, and how far it has come."""

    folder: Path
    rank: int
    launcher: int
    """Process id."""
    step: int = 0
    """Of the run, that is being done."""
    left: list[Fault] = field(default_factory=list)
    full_until: int = 0

    def __post_init__(self) -> None:
        faults = [Fault(**each) for each in json.loads((self.folder / FOLDER).read_text())]
        self.left = [fault for fault in faults if fault.rank == self.rank]

    def at(self, moment: str) -> None:
        """Do what is due."""
        for fault in self.left:
            is_due = self.step >= fault.step if fault.after < 0 else self._fired(fault.after)
            if fault.moment == moment and is_due and self._take(fault):
                self._do(fault)

    def end_step(self) -> None:
        """Note that a step was done."""
        row = json.dumps([time.monotonic(), self.step, os.getpid()])
        with (self.folder / STEPS / f"{self.rank}.jsonl").open("a") as file:
            file.write(f"{row}\n")
        if self.step == self.full_until:
            for agent in agents(self.folder):
                resource.prlimit(agent, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    def _fired(self, number: int) -> bool:
        return (self.folder / FIRED / str(number)).exists()

    def _take(self, fault: Fault) -> bool:
        """Nobody did it before."""
        try:
            with (self.folder / FIRED / str(fault.number)).open("x") as file:
                json.dump({"at": time.monotonic(), "step": self.step, "pid": os.getpid()}, file)
        except FileExistsError:
            return False
        return True

    def _do(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                _cut()
            case "slow":
                time.sleep(SLOW_S)
            case "clock":
                shifted = _shifted(time.time, DAY_S if self.step % 2 else -DAY_S)
                time.time = shifted
            case "agent":
                _end(agents(self.folder))
            case "full":
                for agent in agents(self.folder):
                    resource.prlimit(agent, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                self.full_until = self.step + FULL_STEPS
            case "all":
                _end([self.launcher, os.getpid()])
            case "flip" | "truncate":
                _end([self.launcher, *agents(self.folder)])
                _damage(self.folder, flip=fault.kind == "flip")
                _end([os.getpid()])


@contextmanager
def appointed(appointments: Appointments) -> Iterator[None]:
    """Training asks at every moment what is due."""

    def before(owner: type, name: str, moment: Callable[..., str], *, after: bool = False) -> Any:
        method = getattr(owner, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            if not after:
                appointments.at(moment(*args))
            result = method(*args, **more)
            if after:
                appointments.at(moment(*args))
            return result

        return replaced(owner, name, wrapped)

    step, train = Engine.step, loop.train

    def counted_step(engine: Engine[Any], batch: Any, **more: Any) -> Any:
        appointments.step += 1
        appointments.at("forward")
        result = step(engine, batch, **more)
        appointments.end_step()
        return result

    def counted(run: Run, hooks: Sequence[Any]) -> int:
        appointments.step = run.first_step
        return train(run, hooks)

    with ExitStack() as stack:
        for one in (
            before(RankLife, "_enter", lambda _, phase: str(phase)),
            before(Gradients, "finish", lambda *_: "backward"),
            before(Gradients, "squared_norm", lambda *_: "reduction"),
            before(Engine, "update", lambda *_: "update"),
            before(AgentClient, "copy", lambda *_: "snapshot"),
            before(AgentClient, "hand_over", lambda *_: "handed over", after=True),
            before(AgentClient, "commit", lambda *_: "commit"),
            replaced(Engine, "step", counted_step),
            replaced(running, "train", counted),
        ):
            stack.enter_context(one)
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute has another value meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def agents(folder: Path) -> list[int]:
    """Process ids of the agents that write for a run."""
    found = []
    log = str((folder / "run" / "logs").resolve())
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            is_agent = (
                process.name.isdecimal()
                and b"weft.checkpoint.agent" in (process / "cmdline").read_bytes()
            )
            if is_agent and str((process / "fd/1").readlink()).startswith(log):
                found.append(int(process.name))
    return found


def write(folder: Path, faults: Sequence[Fault]) -> None:
    """Leave the appointments where ranks look for them."""
    for name in (FIRED, STEPS):
        (folder / name).mkdir()
    (folder / FOLDER).write_text(json.dumps([asdict(fault) for fault in faults]))


def _end(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _cut() -> None:
    """Every connection of this process ends, as if a cable was pulled and pushed back."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
                end.shutdown(socket.SHUT_RDWR)


def _shifted(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def _damage(folder: Path, *, flip: bool) -> None:
    """One bit, or the end, of the largest file of what was saved last, if anything was."""
    name = read_latest(folder / "run" / "checkpoints")
    if name is None:
        return
    path = max(
        (folder / "run" / "checkpoints" / name).glob("*"), key=lambda each: each.stat().st_size
    )
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        if not flip:
            file.truncate(middle)
            return
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
