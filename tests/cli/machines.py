"""Machines that programs take for real ones: with a name, an address and processes of their own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cli import commands

from weft.cluster.cluster_file import ClusterFile
from weft.lab.identity import Identity
from weft.lab.network import Network, host_address
from weft.lab.ranks import start
from weft.lab.tools import why_not_here

NAMESPACES = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
"""Of a machine: as ``nsenter`` has them, and below ``/proc``."""
FIRST = """\
set -e
hostname "$1"
mount --bind hosts /etc/hosts
mount --bind "$1" local
touch local/is-up
exec env --ignore-signal=CHLD sleep infinity
"""
"""Its first process: orphans are its children and leave nothing, and all others end with it."""


def why_not(*programs: str) -> str:
    """Why there can be no machines with these programs here; empty where there can."""
    missing = [each for each in ("unshare", "nsenter", *programs) if shutil.which(each) is None]
    return f"no {', '.join(missing)}" if missing else why_not_here()


@dataclass(frozen=True)
class Machine:
    """One that is up."""

    name: str
    address: str
    folder: Path
    """It sees this as the folder ``local``, where others see their own."""
    process: subprocess.Popen[bytes]

    def enter(self, *words: str) -> tuple[str, ...]:
        """A command that runs ``words`` there, in the folder that is the current one here."""
        of = f"/proc/{self.process.pid}/ns"
        places = [f"--{what}={of}/{file}" for what, file in NAMESPACES.items()]
        return ("nsenter", *places, "--", "env", "-C", str(Path.cwd()), *words)

    def rank(self, out: Path, number: int) -> int:
        """Process id, as it is here, of a rank above 0 of the run in ``out``."""
        log = str((out / f"logs/rank{number}.log").resolve())
        return min(pid for pid in self.pids() if commands.stdout(pid) == log)

    def pids(self) -> list[int]:
        """All of its processes, as they are numbered here."""
        mine = self._space(f"{self.process.pid}", "pid_for_children")
        every = (path.name for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [int(pid) for pid in every if self._space(pid, "pid") == mine]

    def lose(self) -> None:
        """Nothing runs there any more."""
        self.process.kill()
        self.process.wait()

    @staticmethod
    def _space(pid: str, kind: str) -> Path | None:
        with suppress(OSError):
            return Path(f"/proc/{pid}/ns/{kind}").readlink()
        return None


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[Sequence[Machine]]:
    """In one network, with the files of this machine; what runs there ends with the context."""
    cluster = {"hosts": [{"name": name, "chips": [{"kind": "any"}]} for name in names]}
    network = Network(Identity.own(), ClusterFile.model_validate(cluster))
    addresses = [host_address(number) for number in range(len(names))]
    known = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *known]))
    for name in ("local", *names):
        (folder / name).mkdir()
    found: list[Machine] = []
    with ExitStack() as stack:
        stack.callback(network.remove)
        network.build()
        for number, name in enumerate(names):
            own = ("--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
            process = start(
                ("env", "-C", str(folder), "unshare", *own, "sh", "-c", FIRST, "sh", name),
                {"RANK": str(number)},
                namespace=network.hosts[number],
                groups=(),
                stdout=None,
            )
            found.append(Machine(name, addresses[number], folder / name, process))
            stack.callback(found[-1].lose)
        wait_until(lambda: all((machine.folder / "is-up").exists() for machine in found))
        yield found


def wait_until(condition: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + commands.TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long: {why()}"
        time.sleep(0.05)
