"""Who started this process, and in which variables it says so. One row for each launcher.

Their words are translated into torchrun's here, and nothing else knows a launcher. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from weft.config.errors import ConfigError

Environment = Mapping[str, str]

PORT = 29400
"""Of rank 0, where a launcher names none. torchrun has 29500."""
STEP_MOST = 0xFFFFFFF0
"""Slurm numbers what is no ``srun`` (a batch script, a shell) from here."""
MOST_RANKS = 2**20
PORTS = range(1, 2**16)
_NUMBER = re.compile(r"[0-9]{1,18}")
_COUNT = r"0*[1-9][0-9]{0,6}"
_COUNTS = re.compile(rf"{_COUNT}(\(x{_COUNT}\))?(,{_COUNT}(\(x{_COUNT}\))?)*")
_LABEL = r"\w([\w-]{0,61}\w)?"
_NAME = re.compile(rf"(?=.{{1,254}}$){_LABEL}(\.{_LABEL})*\.?", re.ASCII)


class VariableError(ConfigError):
    """Of a variable that this process has: another one of its machine may have a right one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """Where a launcher says what. Of several variables the first that is there counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    ranks_here: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    """The number of the machine, or of what plays one."""
    started: Callable[[Environment], bool]
    """Whether a process with its variable of ranks is one of a job."""
    host: Callable[[Environment], str] = lambda _: ""
    """Of rank 0, where nobody set ``MASTER_ADDR``; empty where it is not known."""
    port: Callable[[Environment], int] = lambda _: PORT
    hint: str
    """How a person gives what is missing."""


def _is_step(environment: Environment) -> bool:
    """``srun`` started it, as one of several tasks."""
    step = environment.get("SLURM_STEP_ID", "")
    is_one = not step.isdecimal() or int(step) >= STEP_MOST
    return not (is_one or environment.get("SLURM_NTASKS") == "1" or _is_typed(environment))


def _is_typed(environment: Environment) -> bool:
    """A person typed it into a shell of ``srun --pty``, which is the first of the tasks. A step
    begun in there inherits the variable, and has no terminal."""
    return "SLURM_PTY_PORT" in environment and has_terminal()


def has_terminal() -> bool:
    """Somebody can stop this process with Ctrl-C."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _slurm_host(environment: Environment) -> str:
    """The first node of the step, which has rank 0."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return first_host(_first(environment, names)[1])


def _slurm_port(environment: Environment) -> int:
    """Another one for each step of each job."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    hint = "Start it with `srun`."
    job, step = (_number(n, environment.get(n, "0"), range(2**32), hint=hint) for n in names)
    return 20000 + (job + 997 * step) % 12000  # from 32768 systems give ports to anybody


def _own_host(rank_here: str, ranks: str) -> Callable[[Environment], str]:
    """This machine, where all ranks are on it."""
    return lambda environment: (
        "127.0.0.1" if environment.get(rank_here) == environment.get(ranks) else ""
    )


LAUNCHERS = (
    Launcher(
        name="torchrun",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        ranks_here=("LOCAL_WORLD_SIZE",),
        node=("GROUP_RANK",),
        started=lambda environment: "WORLD_SIZE" in environment,
        port=lambda _: 0,
        hint="",
    ),
    Launcher(
        name="Slurm's srun",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        ranks_here=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node=("SLURM_NODEID",),
        started=_is_step,
        host=_slurm_host,
        port=_slurm_port,
        hint="Start it with `srun`.",
    ),
    Launcher(
        name="Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        ranks_here=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        started=lambda environment: environment.get("OMPI_COMM_WORLD_SIZE") != "1",
        host=_own_host("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        hint="Give it to every process: `mpirun -x MASTER_ADDR=HOST`.",
    ),
    Launcher(
        name="mpiexec (PMI)",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        ranks_here=("MPI_LOCALNRANKS",),
        started=lambda environment: environment.get("PMI_SIZE") != "1",
        host=_own_host("MPI_LOCALNRANKS", "PMI_SIZE"),
        hint="Give it to every process: `mpiexec -genv MASTER_ADDR HOST`.",
    ),
    Launcher(
        name="a Kubernetes indexed job",
        rank="JOB_COMPLETION_INDEX",
        world_size=("WORLD_SIZE",),
        node=("JOB_COMPLETION_INDEX",),
        # Without either the pods of an indexed job have nothing to do with one another.
        started=lambda environment: bool({"WORLD_SIZE", "MASTER_ADDR"} & environment.keys()),
        hint="Write it into `env` of the pod's container, or let `weft plan` write the manifest.",
    ),
)


def launcher_of(environment: Environment) -> Launcher | None:
    """Whoever started this process as one of a job. The first row that fits: a ``torchrun`` that
    ``srun`` started is the one that knows the ranks."""
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.started(environment):
            return launcher
    return None


def as_torchrun(environment: Environment, *, may_be_spare: bool = False) -> dict[str, str]:
    """What torchrun would say where another launcher started this process; empty where none did.

    Args:
        may_be_spare: Machines that come later have numbers beyond the job's.

    Raises:
        ConfigError: names the variable that is missing, or cannot be.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        return {}
    name, size = _first(environment, launcher.world_size)
    if not size:
        expected = f"the number of processes, beside {launcher.rank} of {launcher.name}"
        raise ConfigError(name, None, expected, launcher.hint)
    hint = _way_out(launcher)
    world_size = _number(name, size, range(1, MOST_RANKS + 1), hint=hint)
    beside = "" if may_be_spare else f"{name} is {world_size}"
    possible = range(MOST_RANKS if may_be_spare else world_size)
    rank = _number(launcher.rank, environment[launcher.rank], possible, beside, hint)
    found = {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    return found | _place(launcher, environment, found) | _meeting(launcher, environment)


def _place(launcher: Launcher, environment: Environment, job: dict[str, str]) -> dict[str, str]:
    """Which of how many processes of its machine it is, and which machine that is."""
    hint, rank, world_size = _way_out(launcher), int(job["RANK"]), int(job["WORLD_SIZE"])
    beside = f"{launcher.rank} is {rank}"
    name, text = _first(environment, launcher.local_rank)
    local_rank = _number(name, text or "0", range(rank + 1), beside, hint)
    found = {"LOCAL_RANK": f"{local_rank}"}
    name, text = _first(environment, launcher.node)
    node = _number(name, text or "0", range(MOST_RANKS), hint=hint)
    if text:
        found["GROUP_RANK"] = f"{node}"
    named, here = _first(environment, launcher.ranks_here)
    if not here:
        return found
    counts = tasks_per_node(here) if _COUNTS.fullmatch(here) else []
    if len(counts) > 1:
        beside_counts = f"{named} is of so many nodes"
        node = _number(name, text, range(len(counts)), beside_counts, hint)
        here = f"{counts[node]}"
        _refuse_scattered(launcher, job | found, counts)
    possible = range(local_rank + 1, max(world_size - rank, 1) + local_rank + 1)
    beside = f"this is process {local_rank} of its machine and rank {rank} of {world_size}"
    return found | {"LOCAL_WORLD_SIZE": f"{_number(named, here, possible, beside, hint)}"}


def _number(name: str, text: str, possible: range, beside: str = "", hint: str = "") -> int:
    """What a variable says, which is one of these.

    Raises:
        ConfigError: it is not.
    """
    if _NUMBER.fullmatch(text) and int(text) in possible:
        return int(text)
    first, last = possible[0], possible[-1]
    expected = f"{first}" if first == last else f"a number from {first} to {last}"
    raise VariableError(name, text, f"{expected}, as {beside}" if beside else expected, hint)


def _way_out(launcher: Launcher) -> str:
    return f"Leave it to {launcher.name}, or unset {launcher.rank} to train here alone."


def _meeting(launcher: Launcher, environment: Environment) -> dict[str, str]:
    """Where rank 0 is found."""
    found = {}
    known = {"MASTER_ADDR": launcher.host(environment), "MASTER_PORT": launcher.port(environment)}
    for key, own in known.items():
        found[key] = environment.get(key) or str(own or "")
        if not found[key]:
            expected = f"the address and port of rank 0 beside {launcher.rank}"
            raise ConfigError(key, environment.get(key), expected, launcher.hint)
    hint = "Give the same port of rank 0's machine to every process."
    port = _number("MASTER_PORT", found["MASTER_PORT"], PORTS, hint=hint)
    if not is_host(found["MASTER_ADDR"]):
        expected = "the name of rank 0's machine, or its address, and nothing else"
        hint = "Its port is MASTER_PORT; an address of IPv6 is written as ::1."
        raise VariableError("MASTER_ADDR", found["MASTER_ADDR"], expected, hint)
    return found | {"MASTER_PORT": f"{port}"}


def is_host(text: str) -> bool:
    """It may be the name of a machine, or is an address."""
    try:
        ip_address(text)
    except ValueError:
        is_number = text.rstrip(".").rpartition(".")[2].isdecimal()
        return _NAME.fullmatch(text) is not None and not is_number
    return True


def first_host(nodes: str) -> str:
    """``gpu08`` of ``gpu[08-11,17],head``."""
    one = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", one)


def tasks_per_node(text: str) -> list[int]:
    """``[2, 2, 2, 1]`` of ``2(x3),1``."""
    counts = list[int]()
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or "1")
    return counts


def _refuse_scattered(launcher: Launcher, found: Environment, counts: list[int]) -> None:
    """The ranks of a machine must follow one another, as their devices do."""
    before = sum(counts[: int(found["GROUP_RANK"])])
    if int(found["RANK"]) != before + int(found["LOCAL_RANK"]):
        expected = f"rank {before + int(found['LOCAL_RANK'])} there: consecutive ranks on each node"
        raise ConfigError(
            launcher.rank,
            int(found["RANK"]),
            expected,
            "Start it with `srun --distribution=block`.",
        )


def _first(environment: Environment, names: Iterable[str]) -> tuple[str, str]:
    """The name and value of the first variable that is there; the last name where none is."""
    name = ""
    for name in names:
        if environment.get(name):
            return name, environment[name]
    return name, ""
