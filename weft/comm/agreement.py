"""Ranks that another launcher started agree on something before they know their job.

Each says what it knows, rank 0 decides, and all hear the same: through the store at which they will
meet again to join, so that no collective and no device is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from weft.comm.arrival import await_ranks
from weft.comm.rendezvous import ARRIVAL_S, Rendezvous
from weft.config.errors import ConfigError, ConfigErrors, RunError

DECISION_S = 600.0
"""How long rank 0 may think."""
GRACE_S = 10.0
"""How long it stays for the others to hear."""
VERDICT = "verdict"

Decide = Callable[[Sequence[Any]], str]
"""What every rank knows, by rank -> what all are told."""


class Agreement:
    """One round of questions. Keep the rendezvous open until all ranks have joined."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._address = rendezvous.address
        self._store = rendezvous.store("agreement")
        self._arrival_s = min(rendezvous.timeout_s, ARRIVAL_S)

    def agree(self, mine: object, decide: Decide) -> str:
        """What ``decide`` makes of what all ranks know; it runs on rank 0 alone.

        Raises:
            ConfigError: a rank has not come, or rank 0 refused; on every rank.
            RunError: nothing was heard of rank 0.
        """
        address, store = self._address, self._store
        store.set(f"knows/{address.rank}", json.dumps(mine))
        await_ranks(store, address.rank, address.world_size, self._arrival_s)
        if address.rank > 0:
            return self._hear()
        everyone = [json.loads(store.get(f"knows/{r}")) for r in range(address.world_size)]
        try:
            decision = decide(everyone)
        except (ConfigError, ConfigErrors) as error:
            self._tell({"refused": str(error)})
            raise
        self._tell({"decided": decision})
        return decision

    def _tell(self, verdict: Mapping[str, str]) -> None:
        """All others, and stay until they have heard: the store may end with this rank."""
        self._store.set(VERDICT, json.dumps(verdict))
        heard = [f"heard/{rank}" for rank in range(1, self._address.world_size)]
        if heard:
            with suppress(RuntimeError):
                self._store.wait(heard, timedelta(seconds=GRACE_S))

    def _hear(self) -> str:
        try:
            self._store.wait([VERDICT], timedelta(seconds=DECISION_S))
            verdict: Mapping[str, str] = json.loads(self._store.get(VERDICT))
            self._store.set(f"heard/{self._address.rank}", "1")
        except RuntimeError as error:
            raise RunError("rank 0 has not said what it decided") from error
        if "refused" in verdict:
            raise ConfigError("plan.auto", None, "", f"rank 0 refused: {verdict['refused']}")
        return verdict["decided"]
