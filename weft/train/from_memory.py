"""Whether a run goes on from what its machines have in memory, which all ranks decide alike."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.agent.client import ask_agent
from weft.checkpoint.agent.image import Image, pieces_from_json, pieces_json
from weft.checkpoint.agent.lease import Lease, agent_address
from weft.checkpoint.agent.memory import ANSWER_S, MemoryOfMachine, Offer, in_memory
from weft.checkpoint.agent.peers import get
from weft.checkpoint.agent.wire import Open, Opened
from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.store import folder_step, read_latest
from weft.comm.address import host_for_others, own_host
from weft.comm.comm import Comm

NAME = "memory of machines"
START_DIGITS = 16
"""Of the name of a save: when the ranks began that made it, so that a later beginning is more."""


def new_start() -> str:
    """Begins the names of all saves of ranks that begin now."""
    return f"{time.time_ns():0{START_DIGITS}x}"


def node_of(comm: Comm) -> str:
    """The machine of this rank, as its agent knows it."""
    return comm.members[comm.rank].node or f"{socket.gethostname()}/"


def newest_in_memory(
    held: Path, root: Place, comm: Comm, *, before: int, lease: Lease
) -> tuple[Checkpoint | None, Sequence[str]]:
    """The newest state that the machines have whole, unless storage has a newer one; and what is
    worth knowing of that. Collective.

    Args:
        held: The folder that agents hold.
        root: Where checkpoints lie.
        before: One of this step or later is only taken from the disk.
        lease: Holds on to what is taken, until the run has a newer copy or ends.
    """
    answer_s = min(ANSWER_S, comm.timeout_s / 2)
    with MemoryOfMachine(held, node_of(comm), answer_s=answer_s) as memory:
        everyone = comm.gather_json(
            {
                "offers": list(map(asdict, memory.offers)),
                "made": memory.latest,
                "secret": secrets.token_hex(32),
            },
            name=NAME,
        )
        found = _newest_of_all(everyone)
        if found is None or found.offer.step >= before:
            return None, ()
        step = found.offer.step
        latest = comm.gather_json(_latest(root) if comm.rank == 0 else "", name=NAME)[0]
        on_disk = folder_step(Path(latest or ""))
        made = max(folder_step(Path(each["made"])) for each in everyone)
        if on_disk > step:
            return None, ()
        if latest is not None and on_disk < made:
            return None, [f"{root}/latest was changed since: what is in memory is left"]
        hosts = () if found.is_everywhere else comm.gather_json(own_host(), name=NAME)
        mine = _Mine(held, comm, found, everyone[0]["secret"], answer_s, hosts)
        parts = comm.gather_json(mine.part(memory), name=NAME)
        problems = [part["problem"] for part in parts if "problem" in part]
        if problems:
            return None, [f"{problems[0]}: going on from the disk"]
        mine.hold_on(lease)
        note = f"the state after step {step} was in memory; {_said(root, latest, on_disk)}"
        return mine.checkpoint(parts), [note]


def _latest(root: Place) -> str | None:
    """The checkpoint that storage goes on from; empty where there is none; None: no answer."""
    with suppress(CheckpointError):
        return read_latest(root) or ""
    return None


def _said(root: Place, latest: str | None, step: int) -> str:
    """Of what storage has, in words."""
    if latest is None:
        return f"{root} does not answer"
    if step < 0:
        return "there is no checkpoint on disk"
    return f"the newest checkpoint on disk is of step {step}"


@dataclass(frozen=True)
class _Found:
    """A save that the machines have together."""

    offer: Offer
    """Of all ranks that copied it."""
    holders: Mapping[int, int]
    """The rank now that speaks for the copy of each rank then."""
    is_everywhere: bool
    """Every machine has all of it."""


def _newest_of_all(everyone: Sequence[Mapping[str, Any]]) -> _Found | None:
    offers: dict[str, dict[int, Sequence[int]]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    for rank, each in enumerate(everyone):
        for offer in each["offers"]:
            offers.setdefault(offer["name"], {})[rank] = offer["ranks"]
            facts[offer["name"]] = offer
    whole = []
    for name, by_rank in offers.items():
        ranks = range(facts[name]["world_size"])
        holders = {
            copied: min(rank for rank, has in by_rank.items() if copied in has)
            for copied in set().union(*by_rank.values())
        }
        if len(holders) == len(ranks):
            offer = Offer(facts[name]["step"], name, len(ranks), list(ranks))
            is_everywhere = len(by_rank) == len(everyone) and all(
                len(has) == len(ranks) for has in by_rank.values()
            )
            whole.append(_Found(offer, holders, is_everywhere))
    # Who has gone on without a machine has left what that machine had, however far it was.
    return max(
        whole, key=lambda each: (each.offer.name[:START_DIGITS], each.offer.step), default=None
    )


class _Mine:
    """What this rank reads of a save, and what it lets others read."""

    def __init__(
        self,
        held: Path,
        comm: Comm,
        found: _Found,
        secret: str,
        answer_s: float,
        hosts: Sequence[str],
    ) -> None:
        """``hosts``: of all ranks, where one reads what another has."""
        self._path = agent_address(held, node_of(comm)) if held.is_dir() else held
        self._rank, self._found = comm.rank, found
        self._secret, self._answer_s, self._hosts = secret, answer_s, hosts
        self._state: Mapping[str, Any] | None = None
        self._images: dict[int, Image] = {}

    def part(self, memory: MemoryOfMachine) -> Mapping[str, Any]:
        """For all ranks: why this one cannot, or where others find what it speaks for."""
        name, holders = self._found.offer.name, self._found.holders
        here = next((offer for offer in memory.offers if offer.name == name), None)
        if here is None:
            return {}
        try:
            self._state, self._images = memory.images(here)
        except CheckpointError as error:
            return {"problem": str(error)}
        if self._found.is_everywhere or self._rank not in holders.values():
            return {}
        host = host_for_others(self._hosts)
        open_it = Open(secret=self._secret, host=host)
        answer = ask_agent(self._path, open_it, self._answer_s)
        if not (isinstance(answer, Opened) and answer.port):
            return {"problem": f"rank {self._rank}: its machine cannot be reached by others"}
        mine = [rank for rank, holder in holders.items() if holder == self._rank]
        return {
            "address": (host, answer.port),
            "state": self._state,
            "pieces": [(rank, pieces_json(self._images[rank].pieces)) for rank in mine],
        }

    def hold_on(self, lease: Lease) -> None:
        """To what this machine has: others may still read it, and a start after this one."""
        if self._images:
            with suppress(OSError):
                lease.take(self._path)

    def checkpoint(self, parts: Sequence[Mapping[str, Any]]) -> Checkpoint:
        """From what is on this machine, and, as far as it is asked for, on others."""
        offer, images, secret = self._found.offer, self._images, self._secret
        holders = self._found.holders
        pieces = {rank: image.pieces for rank, image in images.items()}
        state = self._state
        for part in parts:
            state = state or part.get("state")
            for rank, theirs in part.get("pieces", ()):
                pieces.setdefault(rank, pieces_from_json(theirs))
        assert state is not None, "nobody has the state"

        def image_of(rank: int) -> Image:
            if rank not in images:
                host, port = parts[holders[rank]]["address"]
                images[rank] = get((host, port), secret, offer.name, rank)
            return images[rank]

        return in_memory(offer, state, dict(sorted(pieces.items())), image_of)
