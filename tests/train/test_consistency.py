"""Ranks that differ are refused before any work, in the same words on every rank."""

import shutil
from pathlib import Path

import pytest
import torch

from weft.cluster.cluster import Cluster, Node
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.config.load import load_config
from weft.elastic.pool import WorkerPool
from weft.resolve.resolve import resolve
from weft.train import agreeing
from weft.train import source as origin
from weft.train.agreeing import differing_builds, refuse_unlike_ranks
from weft.train.job import Job

LAPTOP = Node(
    host="laptop", cpu="some", cores=2, memory_gib=16, cpu_bf16=False, chips=(), problems=()
)


def job(overrides: list[str], last_step: int = 30) -> Job:
    resolved = resolve(load_config("debug", overrides), Cluster(nodes=(LAPTOP,)))
    return Job(
        config=resolved.config,
        plan=resolved.plan,
        out=Path("out"),
        last_step=last_step,
        threads=1,
        console="quiet",
        json=False,
        files={},
    )


def told(address: RankAddress, jobs: list[Job], source: str) -> str:
    """What a rank says to its job; the last rank runs the Weft in ``source``, if any."""
    if source and address.rank == len(jobs) - 1:
        origin._FOLDER = Path(source)
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    try:
        refuse_unlike_ranks(comm, jobs[address.rank])
    except ConfigError as error:
        return str(error)
    finally:
        comm.close()
        origin._FOLDER = Path(agreeing.version.__file__).parent
    return ""


SAME = "Start the same command, with the same files, on every machine."
STAGES = "plan.stages=[{layers: 1}, {}]"


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job([]), job([])], ""),
        (
            [job([]), job(["optim.lr=0.1"])],
            f"optim.lr = 0.1: expected 0.003, as on rank 0. Rank 1 differs. {SAME}",
        ),
        (
            [job([STAGES]), job(["plan.stages=[{layers: 2}, {}]"])],
            f"plan.stages[0].layers = 2: expected 1, as on rank 0. Rank 1 differs. {SAME}",
        ),
        (
            [job([STAGES]), job(["plan.shares=[2,1]"])],
            f"plan.shares = [2, 1]: expected null, as on rank 0. Rank 1 differs. {SAME}",
        ),
        (
            [job([]), job([], last_step=5)],
            f"--steps = 5: expected 30, as on rank 0. Rank 1 differs. {SAME}",
        ),
    ],
    ids=["alike", "value", "stage", "another plan", "option"],
)
def test_all_ranks_say_the_same(pool: WorkerPool, jobs: list[Job], message: str) -> None:
    assert pool.run(told, jobs, "", world_size=2) == [message] * 2


def test_another_source_is_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    shutil.copytree(Path(agreeing.__file__).parents[1], tmp_path / "weft")
    both = [job([]), job([])]
    assert pool.run(told, both, str(tmp_path / "weft"), world_size=2) == ["", ""]
    (tmp_path / "weft/optim/adamw/rule.py").write_text("# nothing\n")
    first, second = pool.run(told, both, str(tmp_path / "weft"), world_size=2)
    assert first == second
    assert first.startswith("weft's source = ")
    assert first.endswith(f"as on rank 0. Rank 1 differs. {SAME}")


def built(address: RankAddress, alike: Job, versions: list[str]) -> list[str]:
    """What ranks with these builds of PyTorch say to the same job, and what they note."""
    with (
        pytest.MonkeyPatch.context() as patch,
        join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600) as comm,
    ):
        patch.setattr(torch, "__version__", versions[address.rank])
        driver = {"driver": "13.0" if address.rank == 1 else "12.8"} if comm.world_size > 2 else {}
        notes = list(differing_builds(comm, driver))
        try:
            refuse_unlike_ranks(comm, alike)
        except ConfigError as error:
            return [*notes, str(error)]
        return notes


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (["2.13.0+cpu", "2.13.0+cpu"], []),
        (
            ["2.13.0+cu130", "2.13.0+rocm6.4"],
            ["ranks differ in PyTorch: 2.13.0+cu130 on rank 0, 2.13.0+rocm6.4 on rank 1"],
        ),
        (
            ["2.13.0", "2.13.0a0+git4f2c1d0"],
            ["ranks differ in PyTorch: 2.13.0 on rank 0, 2.13.0a0+git4f2c1d0 on rank 1"],
        ),
        (
            ["2.13.0"] * 3,
            ["ranks differ in driver: 12.8 on ranks 0,2, 13.0 on rank 1"],
        ),
        (
            ["2.13.0+cu130", "2.12.1+cu130"],
            [
                "ranks differ in PyTorch: 2.13.0+cu130 on rank 0, 2.12.1+cu130 on rank 1",
                "torch version = '2.12.1': expected '2.13.0', as on rank 0. "
                f"Rank 1 differs. {SAME}",
            ],
        ),
    ],
    ids=["alike", "vendors", "from source", "drivers", "releases"],
)
def test_builds_of_one_release_may_differ(
    pool: WorkerPool, versions: list[str], said: list[str]
) -> None:
    ranks = len(versions)
    assert pool.run(built, job([]), versions, world_size=ranks) == [said] * ranks
