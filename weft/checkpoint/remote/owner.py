"""Whose turn it is to write into storage far away, which knows no locks: the run's that began last.

    root/owner.json

A run takes the next turn when it begins. One that finds a later turn there when it saves leaves
everything as it is: so a run that was thought to be dead, and the first of two that were started
with one address, neither remove nor replace what is not theirs.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from weft.checkpoint.entry import CheckpointError, told
from weft.checkpoint.remote.path import RemotePath

OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A run, from one start to its end."""

    turn: int
    name: str
    """Of this start alone: two may begin at the same moment."""
    host: str
    since: float
    """Seconds since 1970; for people."""


def take_turn(root: RemotePath) -> Owner:
    """Begin to write there. Raises CheckpointError where the storage does not answer."""
    before = _read(root)
    owner = Owner(
        turn=before.turn + 1 if before else 1,
        name=secrets.token_hex(8),
        host=socket.gethostname(),
        since=time.time(),
    )
    with suppress(CheckpointError):  # then the first save says it
        _write(root, owner)
    return owner


def refuse_other(root: RemotePath, owner: Owner) -> None:
    """Raise CheckpointError where another run has begun to write there since."""
    found = _read(root)
    if found is None or found.turn < owner.turn:
        _write(root, owner)
    elif found.name != owner.name:
        since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(found.since))} UTC"
        problem = f"a run that began on {found.host} at {since} writes there now"
        raise CheckpointError(f"{problem}. Each run needs a place of its own", file=root)


def _read(root: RemotePath) -> Owner | None:
    """None where there is none, or something else."""
    path = root / OWNER
    with told("read", path):
        try:
            data = json.loads(path.read_bytes())
            return Owner(turn=int(data["turn"]), name=str(data["name"]),
                         host=str(data["host"]), since=float(data["since"]))  # fmt: skip
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None


def _write(root: RemotePath, owner: Owner) -> None:
    path = root / OWNER
    with told("written", path):
        path.write_bytes(json.dumps(asdict(owner)).encode())
