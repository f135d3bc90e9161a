"""Which process of a job this is. No torch, so that commands can ask at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAddress:
    """Which process of which job this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store_file: Path | None = None
    """Where the ranks of one machine meet; None: ``MASTER_ADDR`` and ``MASTER_PORT``."""
    phase_file: Path | None = None
    """Where this rank notes which phase of its life it is in; None: nobody asks."""

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> RankAddress | None:
        """The address that torchrun, srun or a job system gave this process; None: it gave none."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        for key in ("MASTER_ADDR", "MASTER_PORT"):
            if key not in environment:
                raise ConfigError(key, None, "the address and port of rank 0 beside RANK")
        return RankAddress(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
        )
