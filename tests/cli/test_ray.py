"""``--launcher ray``: a real Ray of two nodes, each a machine of its own where there is root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from cli import commands
from cli.machines import Machine, machines, why_not

from weft.cli.main import run
from weft.elastic.on_ray import Ended, NodeRanks, _came, environments, shares


def test_nodes_with_most_room_come_first() -> None:
    assert shares([1, 4, 2], 7) == [4, 2, 1]
    assert shares([1, 4, 2], 5) == [4, 1]
    assert shares([1, 4, 2], 8) == []
    first, second = environments([2, 1], "10.0.0.1", 99)
    assert [one["RANK"] for one in (*first, *second)] == ["0", "1", "2"]
    assert second == [
        {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "99",
        }
    ]


def test_how_a_rank_ended() -> None:
    assert Ended(0, 0, 1.0, "").failure() is None
    assert Ended(0, 75, 1.0, "").failure() is None
    causes = {
        (2, "error: seed"): "config",
        (-9, ""): "signal",
        (1, "rank 1 gave up, because another rank did: ..."): "peer",
        (1, "KeyError"): "error",
    }
    for (code, said), cause in causes.items():
        failure = Ended(3, code, 1.0, said).failure()
        assert failure is not None
        assert failure.cause == cause


def test_no_rank_stays_where_one_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, plain = [], subprocess.Popen

    def popen(*words: Any, **options: Any) -> Any:
        begun.append(plain(*words, **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyError):
        NodeRanks().run(["sleep", "600"], str(tmp_path), [{"RANK": "0"}, {}])
    assert [process.poll() for process in begun] == [-signal.SIGKILL]


def test_what_ray_says_of_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that could not run its ranks is not one that was lost."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass

    def get(call: Exception) -> None:
        raise call

    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=errors))
    _, (failed,) = _came(RayTaskError("NodeRanks.run()\nTraceback ...\nOSError: no /shared\n"), "4")
    assert (failed.rank, failed.cause) == (4, "error")
    assert failed.message == "its node could not run it: OSError: no /shared"
    _, (lost,) = _came(RayError("The actor died\nunexpectedly"), "2")
    assert (lost.rank, lost.cause) == (2, "signal")
    assert lost.message == "its node was lost: The actor died"


@pytest.mark.skipif(find_spec("ray") is not None, reason="the package ray is here")
def test_without_the_package(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "tiny.yaml", "--out", "mine", "--launcher", "ray"]) == 2
    assert capsys.readouterr().err == (
        "error: --launcher = 'ray': expected the package ray. "
        "pip install 'weft[ray]' on every node.\n"
    )
    assert not (here / "mine").exists()


@dataclass(frozen=True)
class Ray:
    """A cluster of two nodes with room for a rank each."""

    address: str
    program: Sequence[str]
    """Weft where one of its nodes is."""


@pytest.fixture
def ray() -> Iterator[Ray]:
    """On two machines where they can be had, else on this one."""
    pytest.importorskip("ray", reason="pip install ray")
    with ExitStack() as stack:
        if why_not():
            yield stack.enter_context(here_alone())
            return
        # Sockets are in here, whose names may be 107 characters long.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="weft-", dir="/tmp")))
        yield on_machines(folder, stack.enter_context(machines(folder, "alpha", "beta")))


def on_machines(folder: Path, nodes: Sequence[Machine]) -> Ray:
    """All that is started there ends with them."""
    head, address = nodes[0], f"{nodes[0].address}:6379"
    begins = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}/local")
    small = ("--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats")
    start = (sys.executable, "-m", "ray.scripts.scripts", "start")
    for node in nodes:
        how = begins if node is head else (f"--address={address}",)
        words = node.enter(*start, *how, f"--node-ip-address={node.address}", *small)
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=commands.TIMEOUT_S, check=False
        )
        if "timed out during startup" in done.stderr:
            pytest.skip("Ray gives a node 30 s to start, and this machine is busy")
        assert done.returncode == 0, done.stdout + done.stderr
    return Ray(address, head.enter(*commands.COLD))


@contextmanager
def here_alone() -> Iterator[Ray]:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small)
        yield Ray(cluster.address, commands.COLD)
    finally:
        cluster.shutdown()


def ranks_of(command: commands.Command) -> list[int]:
    """Process ids of the job's ranks, which are children of Ray's processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            is_here = (entry / "cwd").readlink() == command.out.parent
        except OSError:
            continue
        rank = [value for value in environment if value.startswith(b"RANK=")]
        if is_here and rank and b"weft" in words:
            found[rank[0]] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def test_two_nodes_train_what_one_does(
    here: Path, whole_run: Callable[..., Path], ray: Ray
) -> None:
    """A rank that is killed is named, and without Ray the run goes on from what was saved."""
    environment = {"RAY_ADDRESS": ray.address, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words, program = ("--launcher", "ray"), ray.program
    with commands.started(
        here, "mine", *words, program=program, environment=environment
    ) as command:
        try:
            command.wait_for_step(5)
            os.kill(ranks_of(command)[1], signal.SIGKILL)
            code, _, errors = command.finish()
        finally:
            for rank in ranks_of(command):  # they are children of Ray's processes, not of this one
                os.kill(rank, signal.SIGKILL)
    assert code == 1
    assert "error: rank 1: was ended by SIGKILL from outside" in errors
    done = commands.steps(here / "mine")[-1]["step"]
    assert 5 <= done < 30
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet"]) == 0
    assert commands.numbers(here / "mine") == commands.numbers(whole_run("fp32"))
