"""``weft train`` whose ranks do what is appointed to them: started by ``benchmarks.chaos``."""

from __future__ import annotations

import os
import sys

from benchmarks.chaos import rank
from weft.cli import train
from weft.cli.main import main

if __name__ == "__main__":
    where, *words = sys.argv[1:]
    os.environ[rank.VARIABLE] = f"{where}:{os.getpid()}"
    train.WORKER = f"{rank.__name__}:rank"
    sys.argv = ["weft", "train", *words]
    main()
