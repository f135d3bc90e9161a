"""``weft train --nproc-per-node``: one command guards the ranks of each machine of a job."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version as version_of
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.checkpoint.remote.owner import Owner
from weft.cli.output import err
from weft.cluster.cluster import Cluster
from weft.comm.address import ARRIVAL_S, RankAddress
from weft.config.check import flat
from weft.config.errors import STOPPED, ConfigError
from weft.config.load import Loaded
from weft.elastic.nodes.fleet import Fleet
from weft.elastic.nodes.head import Head
from weft.elastic.nodes.meeting import Store, bound_to
from weft.elastic.nodes.member import Member, connected
from weft.elastic.nodes.places import Place
from weft.elastic.nodes.remote import Hello
from weft.elastic.process import LocalProcess
from weft.elastic.processes import warm_context
from weft.elastic.rank_process import Begin
from weft.elastic.signals import Asked, interrupted_once
from weft.plan.plan import Plan
from weft.platform.detect import detect
from weft.resolve.left import asking_of
from weft.resolve.peaks import peaks_here
from weft.resolve.planned import facts
from weft.resolve.prediction import Prediction, Quantities
from weft.resolve.queues import refuse_few_queues
from weft.resolve.resolve import Resolved, resolve
from weft.train.job import Job
from weft.train.run_folder import LOGS
from weft.train.source import source
from weft.version import __version__

OPTION = "--nproc-per-node"
WORKER = "weft.train.worker:main"


@dataclass(frozen=True, kw_only=True)
class OnNode:
    """This command, as one of several."""

    loaded: Loaded
    address: RankAddress
    """Its number among them is its rank."""
    out: Path
    last_step: int
    seats: int

    @staticmethod
    def asked(loaded: Loaded, option: str, out: Path | None, steps: int | None) -> OnNode:
        """What the launcher and the command line say.

        Raises:
            ConfigError: nobody started one command on each machine, or a value cannot be used.
        """
        address = RankAddress.from_environment(may_be_spare=True)
        seats = _seats(loaded, option, detect())
        if address is None or address.ranks_here not in (None, 1):
            found = None if address is None else f"{address.ranks_here} commands on this machine"
            expected = "a launcher that starts one command on each machine"
            hint = "`srun --ntasks-per-node=1`, `torchrun --nproc-per-node 1`; or give RANK, "
            hint += "WORLD_SIZE, MASTER_ADDR and MASTER_PORT to each by hand."
            raise ConfigError(OPTION, found or option, expected, hint)
        if out is None:
            hint = "All machines write to one folder: give its path."
            raise ConfigError("--out", None, "a folder that every machine of the job sees", hint)
        every_step = loaded.config.train.steps
        last_step = min(steps or every_step, every_step)
        return OnNode(loaded=loaded, address=address, out=out, last_step=last_step, seats=seats)

    @property
    def arrival_s(self) -> float:
        """How long commands may come one after another."""
        return min(self.loaded.config.train.timeout_s, ARRIVAL_S)

    @property
    def quiet_s(self) -> float:
        """How long another machine may say nothing."""
        return self.loaded.config.recovery.heartbeat_s

    def hello(self) -> Hello:
        """What this machine says of itself."""
        alike: dict[str, object] = {
            "weft version": __version__,
            "torch version": version_of("torch").partition("+")[0].removesuffix("a0"),
            "weft's source": source(),
            **dict(flat(self.loaded.config)),
            "--steps": self.last_step,
        }
        number, name, cluster = self.address.rank, socket.gethostname(), detect()
        chips = dict[str, list[str]]()
        for chip in cluster.nodes[0].chips:
            chips.setdefault(chip.device, []).append(chip.name)
        return Hello(
            index=number,
            seats=self.seats,
            name=name,
            machine=facts(cluster, f"{name}/{number}"),
            chips=chips,
            alike=json.loads(json.dumps(alike, default=str)),
        )


def _seats(loaded: Loaded, option: str, cluster: Cluster) -> int:
    """How many ranks this machine may have."""
    (node,) = cluster.nodes
    if option == "auto":
        return len(node.chips) or max(1, node.cores // (loaded.config.compute.threads or 1))
    if not option.isdecimal() or not int(option):
        hint = '"auto" is one for each GPU, or for each core where there is none.'
        raise ConfigError(OPTION, option, 'a number from 1 on, or "auto"', hint)
    return int(option)


def packed(begin: Begin, ranks: Sequence[int]) -> Mapping[str, Any]:
    """What another machine makes the job of a rank of. ``ranks``: all that it has."""
    job: Job
    (job,) = begin.args
    words = {
        "plan": job.plan.to_json(),
        "last_step": job.last_step,
        "comm_report": job.comm_report,
        "profile": job.profile,
        "began": job.began,
        "owner": asdict(job.owner),
        "ranks": list(ranks),
    }
    if begin.address.rank == 0:  # it writes them down
        prediction = job.prediction
        words["files"] = dict(job.files)
        words["predicted"] = None if prediction is None else asdict(prediction.quantities)
    return words


@contextmanager
def fleet_of(
    head: Head, on_node: OnNode, places: Sequence[Place], context: ForkServerContext
) -> Iterator[Fleet]:
    """The machines of the job, with the first places of its ranks."""
    host, _ = on_node.address.master
    store, logs = Store(bound_to(host), context), on_node.out / LOGS

    def pack(begin: Begin) -> Mapping[str, Any]:
        return packed(begin, fleet.ranks_beside(begin.address.rank))

    def start() -> LocalProcess:
        return LocalProcess(WORKER, logs, context)

    fleet = Fleet(head, host, store, folder=on_node.out, start=start, pack=pack)
    fleet.places = tuple(places)
    try:
        yield fleet
    finally:
        store.close()


class _Here:
    """The job as this machine knows it, which is not the head's."""

    def __init__(self, on_node: OnNode, check: Callable[[Resolved, Sequence[int]], None]) -> None:
        self._on_node, self._check = on_node, check
        self._cluster = detect()

    def accept(self, plan: str, ranks: Sequence[int]) -> None:
        """Raises ConfigErrors: this machine cannot run its ranks of the plan."""
        resolved = self._resolved(plan, ranks)
        if ranks:
            self._check(resolved, ranks)
            refuse_few_queues(resolved.plan, os.environ)

    def unpack(self, words: Mapping[str, Any]) -> tuple[Job]:
        """What ``packed`` was given, as far as it is the same here."""
        resolved = self._resolved(words["plan"], words["ranks"])
        predicted = words.get("predicted")
        sites = {"sites": self._on_node.loaded.config.sites}  # of all, as the job was asked for
        return (
            Job(
                config=resolved.config.model_copy(update=sites),
                plan=resolved.plan,
                out=self._on_node.out,
                last_step=words["last_step"],
                threads=resolved.threads,
                comm_report=words["comm_report"],
                profile=words["profile"],
                prediction=predicted and Prediction(quantities=Quantities(**predicted)),
                peaks=peaks_here(resolved, words["ranks"]),
                files=words.get("files", {}),
                began=words["began"],
                owner=Owner(**words["owner"]),
            ),
        )

    def _resolved(self, text: str, ranks: Sequence[int]) -> Resolved:
        plan = Plan.from_json(text)
        found = resolve(
            asking_of(self._on_node.loaded, plan),  # some sites may be away
            self._cluster,
            world_size=plan.world_size,
            ranks_here=len(ranks) or 1,
            plan=plan,
            why=["as node 0 says"],
        )
        return replace(found, cluster=self._cluster)


def guard_ranks(on_node: OnNode, check: Callable[[Resolved, Sequence[int]], None]) -> int:
    """Be the command of a machine that is not the head's; its exit code.

    Args:
        check: Raises ConfigErrors where ranks of this machine cannot be run.
    """
    here, asked = _Here(on_node, check), Asked()
    context, logs = warm_context(), on_node.out / LOGS
    with TemporaryDirectory(prefix="weft-") as folder:
        try:
            with interrupted_once():
                link = connected(
                    on_node.out,
                    on_node.address,
                    on_node.hello(),
                    quiet_s=on_node.quiet_s,
                    timeout_s=on_node.arrival_s,
                )
        except KeyboardInterrupt:
            err.print("stopped before training began")
            return STOPPED
        member = Member(
            link,
            on_node.address,
            start=lambda: LocalProcess(WORKER, logs, context),
            accept=here.accept,
            unpack=here.unpack,
            folder=Path(folder),
        )
        with asked.handlers():
            return member.run(asked)
