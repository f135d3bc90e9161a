"""Has every rank of the job come? Asked before anything else is, so that nobody waits in vain.

Rank 0 waits for a mark of every rank, then writes down who is missing, and all read the same.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

from weft.config.errors import ConfigError

_VERDICT = "missing"
GRACE_S = 10.0
"""How long rank 0, which may host the store, stays for the others to read what it wrote."""


def await_ranks(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Return when every rank has come.

    Raises:
        ConfigError: names the ranks that have not, on every rank that has.
    """
    store.set(f"here/{rank}", "1")
    marks = [f"here/{other}" for other in range(world_size)]
    if rank == 0:
        missing = [] if come(store, marks, timeout_s) else _missing(store, marks)
        store.set(_VERDICT, ",".join(map(str, missing)) or "none")
        present = [f"read/{r}" for r in range(1, world_size) if r not in missing]
        come(store, present, GRACE_S)
    elif come(store, [_VERDICT], timeout_s + GRACE_S):
        verdict = store.get(_VERDICT).decode()
        missing = [] if verdict == "none" else [int(word) for word in verdict.split(",")]
        store.set(f"read/{rank}", "1")
    else:
        missing = _missing(store, marks)
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        expected = f"as many processes to meet within {timeout_s:g} s"
        hint = f"Missing: {who}. Start one process for each rank, on every machine."
        raise ConfigError("WORLD_SIZE", world_size, expected, hint)


def come(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Whether somebody wrote each of the keys in time."""
    if not keys:
        return True
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def _missing(store: Store, marks: list[str]) -> list[int]:
    return [number for number, mark in enumerate(marks) if not store.check([mark])]
