"""A machine with a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from resolve import profiles

from weft.cluster.cluster import Node


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Two cores that somebody has measured."""
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path / "profiles"))
    machine = profiles.node()
    profiles.save(tmp_path / "profiles", machine)
    return machine
