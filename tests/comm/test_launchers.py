"""Every launcher's variables, and what is said where one is missing."""

from __future__ import annotations

import pytest

from weft.comm import launchers
from weft.comm.address import RankAddress
from weft.comm.launchers import first_host, launcher_of, tasks_per_node
from weft.config.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[08-10,17]",
    "SLURM_JOB_NODELIST": "gpu[07-10,17]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"}
PORT = 20000 + (123456 + 2 * 997) % 12000


@pytest.mark.parametrize(
    ("environment", "name", "expected"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, "1", ("head", 29500))),
        (SLURM, "Slurm's srun", (5, 7, 1, 2, "2", ("gpu08", PORT))),
        (SLURM | {"MASTER_ADDR": "ib0"}, "Slurm's srun", (5, 7, 1, 2, "2", ("ib0", PORT))),
        (SLURM | {"MASTER_PORT": ""}, "Slurm's srun", (5, 7, 1, 2, "2", ("gpu08", PORT))),
        (SLURM | TORCHRUN, "torchrun", (5, 8, 1, 4, "1", ("head", 29500))),
        (OPEN_MPI, "Open MPI's mpirun", (3, 4, 3, 4, "", ("127.0.0.1", 29400))),
        (PMI, "mpiexec (PMI)", (1, 2, 1, 2, "", ("127.0.0.1", 29400))),
        (INDEXED, "a Kubernetes indexed job", (1, 4, 0, None, "1", ("job-0.job", 29400))),
    ],
)
def test_each_launcher_says_who_a_process_is(
    environment: dict[str, str], name: str, expected: tuple[object, ...]
) -> None:
    launcher, found = launcher_of(environment), RankAddress.from_environment(environment)
    assert launcher is not None
    assert found is not None
    assert launcher.name == name
    assert expected == (
        found.rank,
        found.world_size,
        found.local_rank,
        found.ranks_here,
        found.node,
        found.master,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0"},
        SLURM | {"SLURM_NTASKS": "1"},
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"},
        SLURM | {"SLURM_STEP_ID": "4294967290"},
        {"JOB_COMPLETION_INDEX": "3"},
        PMI | {"PMI_SIZE": "1"},
    ],
    ids=["none", "half", "one task", "batch script", "shell of salloc", "sweep", "one process"],
)
def test_who_is_alone_starts_its_own_ranks(environment: dict[str, str]) -> None:
    assert RankAddress.from_environment(environment) is None


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_shell_of_srun(has_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed there is no task of a job; what ``srun`` starts from there inherits its
    variables, and is."""
    monkeypatch.setattr(launchers, "has_terminal", lambda: has_terminal)
    found = RankAddress.from_environment(SLURM | {"SLURM_PTY_PORT": "39695"})
    assert (found is None) == has_terminal
    assert RankAddress.from_environment(SLURM) is not None


def test_ports_that_nobody_is_given() -> None:
    """Below those that systems give to whoever asks for any."""
    steps = [SLURM | {"SLURM_JOB_ID": f"{job}"} for job in range(0, 50000, 77)]
    found = {RankAddress.from_environment(step).master[1] for step in steps}
    assert 20000 <= min(found) <= max(found) < 32768
    assert len(found) > 600


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "MASTER_ADDR = null: expected the address and port of rank 0 beside "
            "OMPI_COMM_WORLD_RANK. Give it to every process: `mpirun -x MASTER_ADDR=HOST`.",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.job"},
            "WORLD_SIZE = null: expected the number of processes, beside JOB_COMPLETION_INDEX of "
            "a Kubernetes indexed job. Write it into `env` of the pod's container, or let "
            "`weft plan` write the manifest.",
        ),
        (
            {key: value for key, value in SLURM.items() if "NODELIST" not in key},
            "MASTER_ADDR = null: expected the address and port of rank 0 beside SLURM_PROCID. "
            "Start it with `srun`.",
        ),
        (
            SLURM | {"SLURM_PROCID": "2", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"},
            "SLURM_PROCID = 2: expected rank 4 there: consecutive ranks on each node. "
            "Start it with `srun --distribution=block`.",
        ),
        (
            TORCHRUN | {"MASTER_PORT": ""},
            "MASTER_PORT = '': expected the address and port of rank 0 beside RANK.",
        ),
    ],
    ids=["several hosts", "no world", "no nodes", "cyclic", "empty port"],
)
def test_what_is_missing_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RankAddress.from_environment(environment)
    assert str(caught.value) == message


FITS_HERE = "a number from 2 to 4, as this is process 1 of its machine and rank 5 of 8"
ONE_OF_FOUR = "a number from 0 to 3, as SLURM_STEP_TASKS_PER_NODE is of so many nodes"
HOST_ALONE = "the name of rank 0's machine, or its address, and nothing else"


@pytest.mark.parametrize(
    ("environment", "name", "value", "expected"),
    [
        (TORCHRUN, "RANK", "8", "a number from 0 to 7, as WORLD_SIZE is 8"),
        (TORCHRUN, "RANK", "-1", "a number from 0 to 7, as WORLD_SIZE is 8"),
        (TORCHRUN, "RANK", "", "a number from 0 to 7, as WORLD_SIZE is 8"),
        (TORCHRUN, "RANK", "\u0665", "a number from 0 to 7, as WORLD_SIZE is 8"),
        (TORCHRUN, "WORLD_SIZE", "0", "a number from 1 to 1048576"),
        (TORCHRUN, "LOCAL_RANK", "6", "a number from 0 to 5, as RANK is 5"),
        (TORCHRUN, "GROUP_RANK", "a", "a number from 0 to 1048575"),
        *((TORCHRUN, "LOCAL_WORLD_SIZE", here, FITS_HERE) for here in ("x", "5")),
        (SLURM, "SLURM_PROCID", "7", "a number from 0 to 6, as SLURM_STEP_NUM_TASKS is 7"),
        (SLURM, "SLURM_NODEID", "4", ONE_OF_FOUR),
        (SLURM, "SLURM_JOB_ID", "x", "a number from 0 to 4294967295"),
        (SLURM, "MASTER_PORT", "any", "a number from 1 to 65535"),
        (PMI, "PMI_RANK", "7", "a number from 0 to 1, as PMI_SIZE is 2"),
        (INDEXED, "JOB_COMPLETION_INDEX", "q", "a number from 0 to 3, as WORLD_SIZE is 4"),
        (TORCHRUN, "MASTER_PORT", "0", "a number from 1 to 65535"),
        (TORCHRUN, "MASTER_PORT", "65536", "a number from 1 to 65535"),
        (TORCHRUN, "MASTER_PORT", "9" * 5000, "a number from 1 to 65535"),
        *(
            (TORCHRUN, "MASTER_ADDR", host, HOST_ALONE)
            for host in ("host:29400", "http://host/", "[::1]", "256.1.1.1", "a b", "-a", "a..b")
        ),
    ],
)
def test_what_cannot_be_is_named(
    environment: dict[str, str], name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RankAddress.from_environment(environment | {name: value})
    assert (caught.value.key, caught.value.value, caught.value.expected) == (name, value, expected)
    assert caught.value.hint


def test_a_spare_machine_has_a_number_beyond_those_of_the_job() -> None:
    one = TORCHRUN | {"RANK": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = RankAddress.from_environment(one, may_be_spare=True)
    assert found is not None
    assert (found.rank, found.world_size, found.ranks_here) == (9, 8, 1)
    with pytest.raises(ConfigError, match="RANK = '-1'"):
        RankAddress.from_environment(one | {"RANK": "-1"}, may_be_spare=True)


def test_names_and_addresses_of_machines() -> None:
    for host in ("a", "gpu-01.cluster.local.", "job_0-0.job", "127.0.1.1", "::1", "fe80::1%eth0"):
        found = RankAddress.from_environment(TORCHRUN | {"MASTER_ADDR": host})
        assert found is not None
        assert found.master == (host, 29500)


def test_lists_of_slurm() -> None:
    lists = ("a", "a,b", "gpu[08-11,17],head", "r[1,3]n[02-04]", "x[7]")
    assert [first_host(nodes) for nodes in lists] == ["a", "a", "gpu08", "r1n02", "x7"]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
