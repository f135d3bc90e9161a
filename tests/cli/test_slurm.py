"""The same command under Slurm: Debian's own, with two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cli import commands

from weft.cli.doctor import _launcher
from weft.cli.main import run

PROGRAMS = ("slurmctld", "slurmd", "srun", "scancel", "sinfo")
NODES = (socket.gethostname(), f"{socket.gethostname()}-b")
CONFIG = """\
ClusterName=weft
SlurmctldHost={nodes[0]}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName={nodes[0]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str:
    """What this machine lacks for a Slurm of its own."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install slurmctld slurmd slurm-client"
    if os.getuid():
        return "Slurm's daemons need root"
    try:
        here = socket.gethostbyname(NODES[0])
    except OSError:
        return f"the name {NODES[0]} leads nowhere"
    return "" if here.startswith("127.") else f"{NODES[0]} is {here}, not on loopback"


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a client of a Slurm whose nodes are idle, and says what it printed."""
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    file = folder / "slurm.conf"
    file.write_text(CONFIG.format(folder=folder, nodes=NODES, ports=ports))
    environment = {**commands.ENVIRONMENT, "SLURM_CONF": str(file)}

    def client(*words: str) -> str:
        limit_s = commands.TIMEOUT_S
        return subprocess.check_output(words, env=environment, text=True, timeout=limit_s)

    daemons = [("slurmctld", "-D", "-c"), *(("slurmd", "-D", "-N", node) for node in NODES)]
    logs = [folder / f"daemon{number}.log" for number in range(len(daemons))]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SLURM_CONF", str(file))
        stack.callback(end_all, str(file))
        for words, log in zip(daemons, logs, strict=True):
            output = stack.enter_context(log.open("wb"))
            daemon = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
        wait_for_nodes(client, logs)
        yield client


def wait_for_nodes(client: Callable[..., str], logs: Sequence[Path]) -> None:
    """Both answer."""
    deadline = time.monotonic() + commands.TIMEOUT_S
    while True:
        with suppress(subprocess.CalledProcessError):  # the controller does not answer yet
            if client("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"]:
                return
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-2000:] for log in logs)
        time.sleep(0.2)


def end_all(file: str) -> None:
    """Whatever still runs of this Slurm and of its jobs, by process id."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if f"SLURM_CONF={file}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def test_srun_alone_starts_what_weft_computes(
    here: Path, whole_run: Callable[..., Path], slurm: Callable[..., str]
) -> None:
    """No torchrun and no address given. The signal that comes before a time limit
    (``--signal=USR1@90``) saves and stops it, and without Slurm it goes on from there."""
    out = here / "mine"
    srun = ("srun", "--nodes=2", "--ntasks=2", "--mpi=none", sys.executable)
    with socket.socket() as probe:  # job 1 of every Slurm has one port, and tests run side by side
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    environment = {"SLURM_CONF": os.environ["SLURM_CONF"], "MASTER_PORT": port}
    with commands.started(here, "mine", program=srun, environment=environment) as command:
        command.wait_for_step(5)
        slurm("scancel", "--signal=USR1", "1")
        code, output, errors = command.finish()
    assert code == 75, errors
    done = commands.steps(out)[-1]["step"]
    assert 5 <= done < 30
    assert f"stopped before step 30; saved: step {done}; " in errors
    assert output.count("run folder: mine") == 1
    assert commands.complaints(out / "logs/rank1.log") == []
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet"]) == 0
    assert commands.numbers(out) == commands.numbers(whole_run("fp32"))
    said = slurm(*srun, "-m", "weft", "doctor")
    for rank in range(2):
        assert f"Slurm's srun: `weft train` is rank {rank} of 2, which meet at {NODES[0]}:" in said


def test_doctor_says_what_a_launcher_left_out() -> None:
    assert list(_launcher({})) == []
    (finding,) = _launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert finding.level == "hint"
    assert finding.says.startswith("Open MPI's mpirun: MASTER_ADDR = null: expected the address")
