"""Build the device ``chipb`` once a machine, and load it where it is asked for."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
ORDER = Path(__file__).with_name("order.h")
BUILD_S = 600
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1")


class BuildError(RuntimeError):
    """The compiler did not take the source."""


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weft" / "chipb"


def built(folder: Path | None = None) -> Path:
    """The library, made now if this source was never built for this PyTorch.

    One process builds, others wait for it; the lock ends with the process that holds it. What is
    half done lies in a folder of its own, and the library appears under its name when it is whole.
    """
    folder = folder or cache()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"chipb-{_fingerprint()}.so"
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as workshop:
                made = Path(workshop) / library.name
                _compile(made)
                made.replace(library)
    return library


def _fingerprint() -> str:
    parts = (
        SOURCE.read_bytes(),
        ORDER.read_bytes(),
        torch.__version__.encode(),
        " ".join(FLAGS).encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(library: Path) -> None:
    command = compiler()
    assert command is not None, "no compiler"
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [f"-I{path}" for path in (ORDER.parent, *include_paths())]
    links = [f"-L{path}" for path in library_paths()]
    rest = [*includes, str(SOURCE), "-o", str(library), *links, *LIBRARIES]
    done = subprocess.run(
        [command, *FLAGS, *rest], capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        raise BuildError(done.stderr)
