"""The programs that build a lab, and what has to be there before one can be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.config.errors import RunError

TIMEOUT_S = 30.0
"""None of these programs waits for anything; one that does is stuck."""
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_GROUPS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")


def why_not_here() -> str:
    """Why no lab can be built by this process; empty where one can."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces and control groups"
    if os.geteuid() != 0:
        return "only root may make network namespaces and control groups"
    if lacking := _capabilities_lacking(Path("/proc/self/status").read_text()):
        return f"this root lacks {' and '.join(lacking)}; start the container with --privileged"
    if not any(os.access(folder, os.W_OK) for folder in _GROUPS):
        return "control groups cannot be made, as /sys/fs/cgroup cannot be written"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; on Debian: apt-get install iproute2"
    return ""


def _capabilities_lacking(status: str) -> list[str]:
    """Of ``/proc/self/status``."""
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if "CapEff:" in line)
    return [name for name, bit in _CAPABILITIES.items() if not mask >> bit & 1]


def call(words: Sequence[str], text: str = "") -> str:
    """Run a program with ``text`` on its standard input; what it printed.

    Raises:
        RunError: it failed, or did not end.
    """
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"`{' '.join(words)}` could not be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        given = f" with\n{text.rstrip()}\n" if text else " "
        raise RunError(f"`{' '.join(words)}`{given}failed: {said}")
    return done.stdout


def batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Run many commands of ``ip`` or ``tc`` inside a network namespace."""
    if lines:
        call([tool, "-n", namespace, "-batch", "-"], "".join(f"{line}\n" for line in lines))
