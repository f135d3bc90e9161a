"""``python -m weft.checkpoint.agent LISTENER PARENT``: a rank starts it and hands over a socket."""

from __future__ import annotations

import os
import socket
import sys

from weft.checkpoint.agent.agent import Agent

NICE = 5
"""Training goes first where it needs the processor itself."""

if __name__ == "__main__":
    os.nice(NICE)
    Agent(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
