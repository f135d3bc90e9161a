"""Whose turn it is to write into storage far away, which knows no locks: the run's that took the
last one.

    root/owner.json

A start of a run takes the next turn with its first save, and has it for as long as it lives. One
that finds a later turn there when it saves leaves everything as it is, also when it saves first and
another has begun since it looked: so a run that was thought to be dead, and one of two that save to
one address, neither remove nor replace what is not theirs.
"""

from __future__ import annotations

import functools
import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from weft.checkpoint.entry import CheckpointError, told
from weft.checkpoint.remote.path import RemotePath

OWNER = "owner.json"
REMEMBERED = 100
"""Starts that a turn names as earlier ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A run, from one start to its end, whatever plans and processes it has meanwhile."""

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of this start alone."""
    host: str = field(default_factory=socket.gethostname)
    since: float = field(default_factory=time.time)
    """Seconds since 1970; for people."""
    found: int | None = None
    """The turn that was there when it began, 0 for none; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    turn: int
    owner: Owner
    earlier: tuple[str, ...]
    """Names of starts that had turns before, the last one first: theirs are over."""


def looked(root: RemotePath, owner: Owner) -> Owner:
    """This start, with the turn that it found when it first looked in this process. Where the
    storage does not answer, it has found none."""
    with suppress(CheckpointError):
        return replace(owner, found=_found(root, owner.name))
    return owner


@functools.cache
def _found(root: RemotePath, _: str) -> int:
    turn = _read(root)
    return 0 if turn is None else turn.turn


def take_turn(root: RemotePath, owner: Owner) -> None:
    """Begin to write there. Nothing changes where it is this run's turn already.

    Raises CheckpointError where another has begun to write there since it was this run's, or since
    this run began; or where the storage does not answer.
    """
    found = _read(root)
    if found is None:
        _write(root, _Turn(turn=1, owner=owner, earlier=()))
    elif owner.name in found.earlier:
        refuse_other(root, owner)
    elif found.owner.name != owner.name:
        if owner.found is not None and found.turn > owner.found:
            refuse_other(root, owner)
        earlier = (found.owner.name, *found.earlier)[:REMEMBERED]
        _write(root, _Turn(turn=found.turn + 1, owner=owner, earlier=earlier))


def refuse_other(root: RemotePath, owner: Owner) -> None:
    """Raise CheckpointError where it is another run's turn."""
    found = _read(root)
    if found is not None and found.owner.name != owner.name:
        other = found.owner
        since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(other.since))} UTC"
        problem = f"a run that began on {other.host} at {since} writes there now"
        raise CheckpointError(f"{problem}. Each run needs a place of its own", file=root)


def _read(root: RemotePath) -> _Turn | None:
    """None where there is none, or something else."""
    path = root / OWNER
    with told("read", path):
        try:
            data = json.loads(path.read_bytes())
            name, host, since = str(data["name"]), str(data["host"]), float(data["since"])
            owner = Owner(name=name, host=host, since=since)
            earlier = tuple(str(name) for name in data.get("earlier", ()))
            return _Turn(turn=int(data["turn"]), owner=owner, earlier=earlier)
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            return None


def _write(root: RemotePath, turn: _Turn) -> None:
    path = root / OWNER
    data = {"turn": turn.turn, **asdict(turn.owner), "earlier": turn.earlier}
    del data["found"]
    with told("written", path):
        path.write_bytes(json.dumps(data).encode())
