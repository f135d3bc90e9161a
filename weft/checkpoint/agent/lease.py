"""Where the agent of a machine answers, and holding on to it. Needs no PyTorch."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from weft.version import __version__


def agent_address(root: Path, node: str = "") -> Path:
    """Where the agent of this machine answers that writes and keeps checkpoints of ``root``.

    A folder of the same name that is made later has another one.

    Raises OSError where the folder does not exist, or there is no place that is this user's alone.
    """
    home = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found, where = home.lstat(), root.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{home} is not a folder of this user alone")
    facts = f"{where.st_dev} {where.st_ino} {node} {__version__}"
    return home / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.agent"


class Lease:
    """Holds on to an agent, so that it stays while ranks come and go. Ends with this process."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._let_go: Callable[[], object] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        """The agent, where this process started it."""

    def take(self, path: Path) -> None:
        """Raises OSError where nobody listens."""
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(str(path))
        except OSError:
            end.close()
            raise
        self.let_go()
        self._let_go = weakref.finalize(self, os.close, end.detach())

    def let_go(self) -> None:
        if self._let_go is not None:
            self._let_go()
            self._let_go = None
