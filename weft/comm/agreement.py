"""Ranks that another launcher started agree on something before they know their job.

Each says what it knows, rank 0 decides, and all hear the same: through the store at which they will
meet again to join, so that no collective and no device is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from weft.comm.address import ARRIVAL_S
from weft.comm.rendezvous import GRACE_S, Rendezvous, await_ranks, come
from weft.config.errors import ConfigError, ConfigErrors, RunError

DECISION_S = 600.0
"""How long rank 0 may think."""
VERDICT = "verdict"


def agree(rendezvous: Rendezvous, mine: object, decide: Callable[[Sequence[Any]], str]) -> str:
    """What ``decide`` makes, on rank 0 alone, of what all ranks know, in rank order.

    Keep the rendezvous open until all ranks have joined.

    Raises:
        ConfigError: a rank has not come, or rank 0 refused; on every rank.
        RunError: nothing was heard of rank 0.
    """
    rank, world_size = rendezvous.address.rank, rendezvous.address.world_size
    store = rendezvous.store("agreement")
    store.set(f"knows/{rank}", json.dumps(mine))
    await_ranks(store, rank, world_size, min(rendezvous.timeout_s, ARRIVAL_S))
    if rank > 0:
        if not come(store, [VERDICT], DECISION_S):
            raise RunError("rank 0 has not said what it decided")
        verdict: dict[str, str] = json.loads(store.get(VERDICT))
        store.set(f"heard/{rank}", "1")
        if "refused" in verdict:
            raise ConfigError("plan.auto", None, "", f"rank 0 refused: {verdict['refused']}")
        return verdict["decided"]
    said = {}
    try:
        said["decided"] = decide([json.loads(store.get(f"knows/{r}")) for r in range(world_size)])
        return said["decided"]
    except (ConfigError, ConfigErrors) as error:
        said["refused"] = str(error)
        raise
    finally:
        if said:  # and stay until the others have heard: the store may end with this rank
            store.set(VERDICT, json.dumps(said))
            come(store, [f"heard/{r}" for r in range(1, world_size)], GRACE_S)
