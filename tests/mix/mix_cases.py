"""A cluster of two kinds, and what the planner answers about it."""

from functools import cache

from weft.cluster.cluster import Node
from weft.cluster.cluster_file import ClusterFile
from weft.mix.chips import Chips, Kind, Shown, only
from weft.mix.questions import Question, Trial, ask
from weft.models.registry import FAMILIES
from weft.planner.problem import Workload

SPEC = FAMILIES["llama"].sizes["demo-5m"]
WORK = Workload(spec=SPEC, seq_len=SPEC.seq_len, samples=28, precision="fp32")
CLUSTER = ClusterFile.model_validate(
    {
        "hosts": [
            {"name": "a", "chips": [{"kind": "big"}, {"kind": "small", "speed": 0.4}]},
            {"name": "b", "chips": [{"kind": "small", "speed": 0.4}]},
        ]
    }
)
BIG, SMALL = Kind("big", (0,)), Kind("small", (1, 2))
KINDS = [BIG, SMALL]
MACHINE = Node(host="here", cpu="nobody's", cores=4, memory_gib=64.0, cpu_bf16=False)
"""Of which there is no profile."""


def chips_of(kind: str = "", shown: Shown | None = None) -> Chips:
    """One kind of the cluster, or all."""
    return Chips.of(only(CLUSTER, kind) if kind else CLUSTER, MACHINE, shown or Shown())


@cache
def part_trial(kind: str, micro: int = 2) -> Trial:
    """The plan of one kind alone."""
    return ask(Question("alone", micro), WORK, chips_of(kind))


@cache
def answers() -> list[Trial]:
    """The plans of all generations over all chips, as nothing was measured."""
    shapes = {kind.name: part_trial(kind.name).shapes[kind.name] for kind in KINDS}
    asked = [Question("pooled", 2, shapes), *(Question(g, 2) for g in ("1", "2", "3"))]
    return [ask(question, WORK, chips_of()) for question in asked]
