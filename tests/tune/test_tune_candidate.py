"""What is said of a plan before it is tried."""

from dataclasses import replace

from benchmarks.every_plan import pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Problem, Workload
from weft.tune.candidate import Candidate, candidate_of

MODEL = replace(SIZES["llama3-8b"], num_layers=8)
CHIPS = ("H100-SXM5-80GB", "A100-SXM4-80GB")


def candidate(mesh: Mesh, sample_shares: tuple[int, ...] = ()) -> Candidate:
    pools = (replace(pool(chip, 800, 1, gbit=100), node="one") for chip in CHIPS)
    work = Workload(spec=MODEL, seq_len=2048, samples=4)
    layers = (0, MODEL.num_layers)
    stage = StagePlan(mesh=mesh, layers=layers, device="cuda", precision="bf16")
    stage = replace(stage, sample_shares=sample_shares)
    line = PipelinePlan(stages=(stage,), samples=4, microbatch=4)
    plan = Plan(num_layers=MODEL.num_layers, pipelines=(line,))
    return candidate_of(plan, Problem(work, ClusterView(tuple(pools))))


def test_unlike_parts_are_told_from_like_ones() -> None:
    """What trials of the ones teach is not all true of the others."""
    like, unlike = Mesh.of(range(2), tp=2), "unlike parts of widths"
    plain, wide = candidate(like), candidate(like.with_shares(tp=(5, 3)))
    assert {*wide.leans} - {*plain.leans} == {unlike} and wide.leans[unlike] == 1
    assert wide.name.startswith("tp 2 (5:3) on 2 ") and plain.name.startswith("tp 2 on 2 ")
    assert Candidate.from_json(wide.as_json()) == wide
    alike, shared = (candidate(Mesh.of(range(2), dp=2), shares) for shares in ((), (3, 1)))
    assert {*shared.leans} - {*alike.leans} == {"unlike samples in a mesh"}
