"""Where other machines reach this one."""

import pytest

from weft.comm import address
from weft.comm.address import host_for_others, own_host


def test_a_name_that_is_a_loopback_address_is_not_given_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's rank 0, whose ``/etc/hosts`` says 127.0.1.1 for its own name."""
    rank_0 = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.1.1",
        "MASTER_PORT": "29500",
    }
    assert own_host(rank_0) == "127.0.0.1"
    assert host_for_others(["127.0.0.1", "127.0.0.1"], rank_0) == "127.0.0.1"
    asked = []

    def toward(host: str, _: int) -> str:
        asked.append(host)
        return {"127.0.1.1": "127.0.0.1", "10.0.0.2": "10.0.0.1"}[host]

    monkeypatch.setattr(address, "_toward", toward)
    assert host_for_others(["127.0.0.1", "10.0.0.2"], rank_0) == "10.0.0.1"
    asked.clear()
    second = {**rank_0, "RANK": "1", "MASTER_ADDR": "10.0.0.2"}
    assert host_for_others(["127.0.0.1", "10.0.0.1"], second) == "10.0.0.1"
    assert asked == ["10.0.0.2"]
