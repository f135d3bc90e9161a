"""The same commands under Debian's Slurm, with munge, on three machines."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cli import commands
from cli.machines import Machine, machines, wait_until, why_not
from cli.test_per_node import EXACT, KEPT, goes_on

from weft.cli.doctor import _launcher
from weft.cli.main import run
from weft.report.events import EVENTS_FILE, read_events

PROGRAMS = ("slurmctld", "slurmd", "srun", "scancel", "sinfo", "munged")
NODES = ("alpha", "beta", "gamma")
CONFIG = """\
ClusterName=weft
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/local/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
SlurmdTimeout=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/local/spool
SlurmctldPidFile={folder}/local/slurmctld.pid
SlurmdPidFile={folder}/local/slurmd.pid
PartitionName=all Nodes=ALL Default=YES State=UP
"""
STEPS = 24
ASKED = (f"train.steps={STEPS}", "train.eval_every=0", "data.workers=0", "compute.precision=fp64")


class Slurm:
    """The first machine controls it; all are its nodes."""

    def __init__(self, folder: Path, hosts: Sequence[Machine]) -> None:
        self.hosts, self._folder, self._file = hosts, folder, folder / "slurm.conf"
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2\n" for host in hosts]
        config = CONFIG.format(folder=folder, head=hosts[0]) + "".join(nodes)
        self._file.write_text(config)
        (folder / "state").mkdir()
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))
        for host in hosts:
            self._begin(host)

    def _begin(self, host: Machine) -> None:
        """Its daemons, each of which goes to the background once it answers."""
        local = self._folder / "local"
        kept = [f"--{what}-file={local}/munge.{what}" for what in ("pid", "log", "seed")]
        key = (f"--key-file={self._folder}/key", f"--socket={local}/munge", "--force")
        self.on(host, "munged", *key, *kept)
        if host is self.hosts[0]:
            self.on(host, "slurmctld", "-c", "-L", f"{local}/slurmctld.log")
        self.on(host, "slurmd", "-L", f"{local}/slurmd.log")

    def on(self, host: Machine, *words: str) -> str:
        """What a program prints there."""
        environment = {**commands.ENVIRONMENT, "SLURM_CONF": str(self._file)}
        limit_s, words = commands.TIMEOUT_S, host.enter(*words)
        return subprocess.check_output(words, env=environment, text=True, timeout=limit_s)

    def wait_for_nodes(self) -> None:
        """All answer."""

        def are_idle() -> bool:
            said = self.on(self.hosts[-1], "sinfo", "--noheader", "--format=%D %t")
            return said.split() == [str(len(self.hosts)), "idle"]

        def logs() -> str:
            found = [log for host in self.hosts for log in host.folder.glob("*.log")]
            return "\n".join(log.read_text()[-2000:] for log in found)

        wait_until(are_idle, logs)

    def train(
        self, here: Path, srun: Sequence[str], *asked: str
    ) -> AbstractContextManager[commands.Command]:
        """``srun`` alone starts all: no torchrun, and no address given."""
        program = self.hosts[0].enter("srun", *srun, *commands.COLD)
        environment = {"SLURM_CONF": str(self._file), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        words = (*ASKED, "plan.shares=[1,1,1,1]", *asked)
        return commands.started(here, "mine", *words, program=program, environment=environment)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not(*PROGRAMS):
        pytest.skip(f"{reason}; apt install slurmctld slurmd slurm-client munge")
    folder = tmp_path_factory.mktemp("slurm")
    with machines(folder, *NODES) as hosts:
        slurm = Slurm(folder, hosts)
        slurm.wait_for_nodes()
        yield slurm


def test_a_run_of_several_machines(here: Path, slurm: Slurm) -> None:
    """Four ranks on two of them compute what one process does: a task each, until the signal that
    comes before a time limit; then one command a machine, which replaces a rank that is killed, and
    all those of a machine that is lost on the third one."""
    out, (_, second, third) = here / "mine", slurm.hosts
    with slurm.train(here, ("-N2", "--ntasks-per-node=2")) as command:
        command.wait_for_step(2)
        slurm.on(third, "scancel", "--signal=USR1", "1")
        code, output, errors = command.finish()
    done = commands.steps(out)[-1]["step"]
    assert code == 75, errors
    assert 2 <= done < STEPS - 6
    assert f"stopped before step {STEPS}; saved: step {done}; " in errors
    assert output.count("run folder: mine") == 1
    assert commands.complaints(out / "logs/rank1.log") == []

    srun = ("-N3", "--ntasks-per-node=1", "--cpus-per-task=2", "--no-kill", "--kill-on-bad-exit=0")
    with slurm.train(here, srun, "--nproc-per-node", "2", *KEPT) as command:
        command.wait_for_step(done + 3)
        os.kill(second.rank(out, 3), signal.SIGKILL)
        goes_on(command, 2)
        second.lose()
        code, _, errors = command.finish()
    assert code == 0, errors
    events = read_events(out / EVENTS_FILE)
    lost = [event.message for event in events if event.kind == "epoch_end"]
    assert len(lost) == 2
    assert "rank 3: was ended by SIGKILL" in lost[0]
    assert "was lost with node 1 (beta)" in lost[1]
    assert "memory" in [each.facts["source"] for each in events if each.kind == "restore"]
    one = ["train", "tiny.yaml", "--out", "one", "--quiet", *ASKED, "plan.shares=[1]"]
    assert run([*one, "checkpoint.asynchronous=false"]) == 0
    mine, whole = commands.steps(out), commands.steps(here / "one")
    assert len(mine) == STEPS
    for key in ("loss", "grad_norm"):
        values = [row[key] for row in whole]
        assert [row[key] for row in mine] == pytest.approx(values, rel=EXACT)


def test_doctor_says_which_launcher_and_what_it_left_out() -> None:
    assert list(_launcher({})) == []
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    (finding,) = _launcher({**slurm, "SLURM_STEP_NODELIST": "alpha,beta"})
    said = "Slurm's srun: `weft train` is rank 1 of 2, which meet at alpha:20007"
    assert finding.says == said
    (finding,) = _launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert finding.level == "hint"
    assert finding.says.startswith("Open MPI's mpirun: MASTER_ADDR = null: expected the address")
