"""``weft plan`` shows what a plan says, and no column that says nothing."""

from weft.cli.plan.text import plan_table
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

UNLIKE = Plan(
    num_layers=4,
    pipelines=(
        PipelinePlan(
            stages=(
                StagePlan(mesh=Mesh.of(range(4), tp=2, dp=2), layers=(0, 3), zero=2),
                StagePlan(mesh=Mesh.of((4, 5), dp=2), layers=(3, 3), recompute="full"),
                StagePlan(mesh=Mesh.of((6,), dp=1), layers=(3, 4), passes=2, recompute="full"),
            ),
            samples=16,
            microbatch=3,
            schedule="zb-h1",
        ),
        PipelinePlan(
            stages=(StagePlan(mesh=Mesh.of((7,), dp=1), layers=(0, 4), compile=True),),
            samples=8,
            microbatch=2,
        ),
    ),
)


def test_unlike_pipelines() -> None:
    assert (
        "\n".join(plan_table(UNLIKE))
        == """\
pipeline  stage  ranks  mesh         layers       samples   micro-batches  schedule  zero  passes  \
computes
0         0      0-3    tp 2 x dp 2  embed + 0-2  16 (67%)  6 x 3          zb-h1     2             \
cpu fp32
          1      4-5    dp 2         none                                                          \
cpu fp32
          2      6                   3 + head                                              2       \
cpu fp32 recompute
1         0      7                   0-3          8 (33%)   4 x 2                                  \
cpu fp32 compiled"""
    )


def test_pieces_have_a_column() -> None:
    stage = StagePlan(mesh=Mesh.of((0, 1), tp=2), layers=(0, 4), pieces=3)
    plan = Plan(num_layers=4, pipelines=(PipelinePlan(stages=(stage,), samples=8, microbatch=2),))
    heading, row = plan_table(plan)
    assert heading[heading.index("pieces") :].split() == ["pieces", "computes"]
    assert row[heading.index("pieces") :].split() == ["3", "cpu", "fp32"]


def test_a_plain_plan_has_few_columns() -> None:
    stage = StagePlan(mesh=Mesh.of((0,), dp=1), layers=(0, 4))
    plan = Plan(num_layers=4, pipelines=(PipelinePlan(stages=(stage,), samples=8, microbatch=2),))
    assert list(plan_table(plan)) == [
        "pipeline  stage  ranks  layers  samples  micro-batches  computes",
        "0         0      0      0-3     8        4 x 2          cpu fp32",
    ]
