"""How ranks fail, and what is done then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

GRACE_S = 3.0
"""How long the other ranks may take to notice a failure and say what they saw."""

Cause = Literal["config", "diverged", "error", "machine", "peer", "signal"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended when it did not end well."""

    rank: int
    cause: Cause
    """A value the user wrote; numbers that are none; an exception; a disk or a file (``RunError``);
    a collective that lost its peer; a signal."""
    message: str
    detail: str = ""
    """Traceback of an exception; empty where the message says all."""
    when: float = 0.0
    phase: str = ""
    """Of the rank's life, as ``weft.train.worker`` names them; empty where it did not say."""
    is_gone: bool = False
    """So is its process: it is not at the door."""

    @property
    def words(self) -> str:
        """Which rank says what; of one that speaks for all, what each of them does."""
        return (
            self.message
            if self.message.startswith("rank ")
            else f"rank {self.rank}: {self.message}"
        )


class RanksFailedError(RuntimeError):
    """At least one rank failed; ``first`` is the one that brought the others down.

    ``waits``: where no rank says more than that it lost another, who waited for whom.
    """

    def __init__(self, failures: Sequence[Failure], waits: str | None = None) -> None:
        order: dict[Cause, int] = {"config": 0, "signal": 1, "peer": 3}
        self.failures = sorted(failures, key=lambda f: (order.get(f.cause, 2), f.when, f.rank))
        self.first = self.failures[0]
        self.waits = waits if self.first.cause == "peer" else None
        super().__init__(self.waits or self.first.words)


ANEW = -1
"""Instead of a rank whose process is kept."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the ranks of a job do until they are done, or one of them is lost."""

    args: tuple[Any, ...]
    world_size: int
    seats: tuple[int, ...] | None = None
    """For each rank the one that its process was before, or ``ANEW``; None: the same one."""


class Moves(Protocol):
    """Somebody may want another plan while the ranks are at work."""

    def wanted(self) -> bool:
        """The ranks are to come to the door between two steps. Asked again and again."""

    def epoch(self) -> Epoch:
        """They have come: what they do next."""


Recover = Callable[[Sequence[Failure]], Epoch | None]
"""What a job goes on with after ranks were lost; None: it is over. Called in the launcher's process
with what happened to each rank, once the others are ready for what is next."""

LOSSES: tuple[Cause, ...] = ("peer", "signal")
"""What begins again may well go on: of everything else a repeat meets the same."""
