"""What the planner is asked: what is to be trained, on which chips, and what it may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from weft.cluster.view import ClusterView
from weft.cost.memory import Memory, memory_of_plan
from weft.cost.sent import Way, sent_by_plan
from weft.cost.work import ALL_BY_ADAMW, Training
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision
from weft.planner.options import Options
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


@dataclass(frozen=True, slots=True)
class Problem:
    """A workload on a cluster. Beside a plan, the plan's ranks are numbered over the cluster."""

    workload: Workload
    cluster: ClusterView
    knowledge: Knowledge = field(default_factory=Knowledge)
    options: Options = field(default_factory=Options)

    def on(self, cluster: ClusterView) -> Problem:
        """The same with other chips."""
        return replace(self, cluster=cluster)

    def time(self, plan: Plan) -> StepTime:
        """Of a step of a plan; see ``time_of_plan``."""
        work = self.workload
        return time_of_plan(
            plan,
            work.spec,
            self.cluster,
            seq_len=work.seq_len,
            knowledge=self.knowledge,
            training=work.training,
        )

    def memory(self, plan: Plan) -> dict[int, Memory]:
        """Of every rank of a plan."""
        work = self.workload
        known = self.knowledge.overheads
        return memory_of_plan(plan, work.spec, work.seq_len, known, work.training)

    def sent(self, plan: Plan) -> Mapping[Way, float]:
        """Bytes that a step of a plan sends."""
        work = self.workload
        return sent_by_plan(
            plan, work.spec, self.cluster, seq_len=work.seq_len, training=work.training
        )

    def with_memory(self, times: float) -> Problem:
        """The same chips with so many times the memory."""
        pools = (
            replace(pool, chip=replace(pool.chip, memory_gib=pool.chip.memory_gib * times))
            for pool in self.cluster.pools
        )
        return self.on(ClusterView(tuple(pools)))

    def with_links(self, inside: float, across: float) -> Problem:
        """The same chips with links of so many times the rate, inside nodes and between them; free
        ones for infinity."""
        pools = [
            replace(
                pool,
                chip=replace(pool.chip, link_gb_s=pool.link_bytes_s / 1e9 * inside),
                network_gbit_s=pool.network_bytes_s * 8e-9 * across,
                oversubscription=1.0,
                link_latency_s=0.0 if inside == inf else pool.link_latency_s,
                network_latency_s=0.0 if across == inf else pool.network_latency_s,
            )
            for pool in self.cluster.pools
        ]
        hardware = {
            name: replace(known, fabric=known.fabric.faster(inside, across))
            for name, known in self.knowledge.hardware.items()
        }
        knowledge = replace(self.knowledge, hardware=hardware)
        return replace(self, cluster=ClusterView(tuple(pools)), knowledge=knowledge)
