"""Ranks that do not come are named, by every rank that did."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby
from typing import Any, cast

import pytest
from torch.distributed import FileStore, HashStore, Store

from weft.comm.rendezvous import await_ranks
from weft.config.errors import ConfigError

LONG_S = 300.0


def outcomes(
    store: Store, ranks: list[int], world_size: int, timeout_s: float, first: Sequence[int] = ()
) -> list[str]:
    """What each of the ranks that come is told; empty where all is well.

    Rank 0 comes after those that come ``first``: their threads may begin late.
    """

    def come(rank: int) -> str:
        if rank == 0:
            store.wait([f"here/{other}" for other in first], timedelta(seconds=LONG_S))
        try:
            await_ranks(store, rank, world_size, timeout_s)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_all_have_come() -> None:
    assert outcomes(HashStore(), [2, 0, 1], 3, LONG_S) == ["", "", ""]


class Counted:
    """A store that notes the calls of one rank, and the bytes that it was given."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[str] = []
        self.received = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            answer = getattr(self._store, name)(*args)
            self.received += len(answer) if isinstance(answer, bytes) else 0
            return answer

        return call


def test_a_rank_asks_as_little_among_many_as_among_few() -> None:
    """Each says 200 letters; packed, what all said is hardly longer for many. How often a rank
    looks whether all have come is up to them."""
    found = {}
    for world_size in (8, 32):
        store = HashStore()
        counted = [Counted(store) for _ in range(world_size)]

        def come(rank: int, counted: list[Counted] = counted) -> list[str]:
            text = f"{rank // 8} " + "x" * 200
            return await_ranks(cast(Store, counted[rank]), rank, len(counted), LONG_S, text)

        with ThreadPoolExecutor(world_size) as pool:
            said = list(pool.map(come, range(world_size)))
        assert said == [[f"{rank // 8} " + "x" * 200 for rank in range(world_size)]] * world_size
        asked = [([call for call, _ in groupby(each.calls)], each.received) for each in counted]
        found[world_size] = asked[1:]
    (few, few_bytes), (many, many_bytes) = (max(found[n], key=lambda e: e[1]) for n in (8, 32))
    assert few == many == ["set", "check", "get", "set"]
    assert many_bytes < 2 * few_bytes < 400


def test_files_serve_as_well(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = FileStore(str(tmp_path_factory.mktemp("store") / "meet"), 2)
    assert outcomes(store, [0, 1], 2, LONG_S) == ["", ""]


def test_all_are_told_who_is_missing() -> None:
    message = (
        "WORLD_SIZE = 4: expected as many processes to meet within 0.2 s. "
        "Missing: ranks 1, 3. Start one process for each rank, on every machine."
    )
    assert outcomes(HashStore(), [0, 2], 4, 0.2, first=[2]) == [message, message]


def test_rank_0_may_be_the_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.comm.rendezvous.GRACE_S", 0.1)
    (message,) = outcomes(HashStore(), [1], 2, 0.1)
    assert "Missing: rank 0." in message
