"""A port for who is told of it and binds it later."""

import random
import socket
from contextlib import suppress

OURS = (12_000, 30_000)
"""Below those that the system gives to whoever asks for any: it gives away none of these
meanwhile."""


def free_port() -> int:
    """Of this machine."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = draw.randrange(*OURS)
            probe.bind(("127.0.0.1", port))
            return port
