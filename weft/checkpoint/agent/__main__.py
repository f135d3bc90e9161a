"""``python -m weft.checkpoint.agent LISTENER PATH PARENT ROOT KEEP_S``: a rank starts it and hands
over a socket and the folder of checkpoints."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from weft.checkpoint.agent.agent import Agent

NICE = 5
"""Training goes first where it needs the processor itself."""

if __name__ == "__main__":
    os.nice(NICE)
    listener, path, parent, root, keep_s = sys.argv[1:]
    end = socket.socket(fileno=int(listener))
    Agent(end, Path(path), int(parent), root=int(root), keep_s=float(keep_s)).serve()
