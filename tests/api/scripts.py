"""A user's script, run in processes that were told of each other as any launcher would."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

from ports import free_port

from weft.comm.address import RankAddress
from weft.elastic.pool import WorkerPool


def run_script(pool: WorkerPool, script: Path, ranks: int, *arguments: str) -> list[str]:
    """What each rank prints. The pool's processes are not as they were: use none of them again."""
    return pool.run(_run, str(script), free_port(), arguments, world_size=ranks)


def _run(address: RankAddress, script: str, port: int, arguments: tuple[str, ...]) -> str:
    if address.world_size > 1:
        os.environ |= {
            "WORLD_SIZE": str(address.world_size),
            "RANK": str(address.rank),
            "LOCAL_RANK": str(address.rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
