"""``python -m benchmarks.slow_agent``: an agent whose files take as long as slow storage needs."""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.checkpoint import draft, rank_file
from weft.checkpoint.entry import Piece, RankFile

VARIABLE = "WEFT_BENCH_MB_S"
"""Of the environment: how fast storage is."""


def write_pieces(
    folder: Path, rank: int, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
) -> RankFile:
    """Return no sooner than storage of that speed would."""
    began = time.perf_counter()
    facts = rank_file.write_pieces(folder, rank, pieces, data)
    needs_s = facts.bytes / (float(os.environ[VARIABLE]) * 1e6)
    time.sleep(max(0.0, needs_s - (time.perf_counter() - began)))
    return facts


if __name__ == "__main__":
    draft.write_pieces = write_pieces
    runpy.run_module("weft.checkpoint.agent", run_name="__main__")
