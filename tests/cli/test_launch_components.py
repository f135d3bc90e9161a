"""Which nodes are of one component of a Slurm job, or one job of a JobSet: any of a pool, or named.

Slurm and Kubernetes order the nodes of one as they like.
"""

from pathlib import Path

import pytest
import yaml

from weft.cli.main import run
from weft.cli.plan.launch import Launch, launch_of_nodes
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.plan_file import NodesUsed, PlanFile


def used(pool: int, nodes: int, *hosts: str, node: str = "", chips: int = 2) -> NodesUsed:
    return NodesUsed(chip="X", pool=pool, nodes=nodes, chips_per_node=chips, node=node, hosts=hosts)


def launch(*chips: NodesUsed, device: str = "cuda") -> Launch:
    world_size = sum(each.ranks for each in chips)
    stage = StagePlan(mesh=Mesh.of(range(world_size), dp=world_size), layers=(0, 2), device=device)
    line = PipelinePlan(stages=(stage,), samples=world_size, microbatch=world_size)
    plan = Plan(num_layers=2, pipelines=(line,))
    return launch_of_nodes("p", ["weft", "train"], PlanFile(plan=plan, chips=chips))


@pytest.mark.parametrize(
    ("chips", "expected"),
    [
        pytest.param([used(0, 2), used(1, 2)], [(2, ""), (2, "")], id="two pools"),
        pytest.param([used(0, 2), used(0, 2)], [(4, "")], id="a pool in two parts"),
        pytest.param(
            [used(0, 1, "b"), used(0, 2, "c", "a")], [(1, "b"), (2, "c,a")], id="and named"
        ),
        pytest.param([used(0, 1), used(1, 1, "a")], [(1, ""), (1, "a")], id="one named"),
        pytest.param([used(0, 1, "a"), used(1, 1)], [(1, "a"), (1, "")], id="the first named"),
        pytest.param(
            [used(0, 1, node="d"), used(1, 1, "a", node="d"), used(2, 1, "b")],
            [(1, "a"), (1, "b")],
            id="of the second pool of a machine",
        ),
    ],
)
def test_a_component_is_of_one_pool(
    chips: list[NodesUsed], expected: list[tuple[int, str]]
) -> None:
    found = launch(*chips)
    lines = found.sbatch.splitlines()
    assert lines.count("#SBATCH hetjob") == len(expected) - 1
    parts = "\n".join(lines).split("#SBATCH hetjob")
    for part, (nodes, hosts) in zip(parts, expected, strict=True):
        assert f"\n#SBATCH --nodes={nodes}\n" in part
        assert (f"\n#SBATCH --nodelist={hosts}\n" in part) if hosts else "nodelist" not in part
    jobs = yaml.safe_load(found.jobset)["spec"]["replicatedJobs"]
    assert [job["template"]["spec"]["completions"] for job in jobs] == [n for n, _ in expected]
    first = chips[0].hosts or (chips[1].hosts if chips[0].node else ())
    address = first[0] if first else '"$MASTER_ADDR"'
    assert f"--master-addr {address} " in found.commands[0]


@pytest.mark.parametrize(("device", "asks"), [("cuda", True), ("npu", True), ("cpu", False)])
def test_devices_are_asked_for_where_ranks_have_some(device: str, asks: bool) -> None:
    found = launch(used(0, 2), device=device)
    assert ("--gpus-per-node=2" in found.sbatch) == asks


def test_a_machine_has_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = "  - {{chip: T4, chips_per_node: 1, node: desk, hosts: [{}]}}\n"
    cluster = tmp_path / "c.yaml"
    cluster.write_text("pools:\n" + pool.format("desk") + pool.format("other"))
    assert run(["plan", "debug", "--cluster", str(cluster)]) == 2
    expected = "pools[1].hosts = ['other']: expected ['desk'], as pools[0] has it of the same node"
    assert expected in capsys.readouterr().err
