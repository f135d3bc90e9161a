"""What is to be trained: a model, the length of its samples, and how many make a step."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cluster.view import ClusterView
from weft.cost.memory import Memory, memory_of_plan
from weft.cost.work import ALL_BY_ADAMW, Training
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision
from weft.simulate.step import Knowledge, StepTime, time_of_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of a training job, before anybody says on which chips."""

    spec: ModelSpec
    seq_len: int
    samples: int
    """Of one step, over the whole job."""
    precision: Precision = "bf16"
    training: Training = ALL_BY_ADAMW

    def time(self, plan: Plan, cluster: ClusterView, knowledge: Knowledge) -> StepTime:
        """Of a step of a plan for it; see ``time_of_plan``."""
        return time_of_plan(
            plan,
            self.spec,
            cluster,
            seq_len=self.seq_len,
            knowledge=knowledge,
            training=self.training,
        )

    def memory(self, plan: Plan, knowledge: Knowledge) -> dict[int, Memory]:
        """Of every rank of a plan for it."""
        known = knowledge.overheads
        return memory_of_plan(plan, self.spec, self.seq_len, known, self.training)
