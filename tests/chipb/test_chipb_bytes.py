"""The most bytes of a step, counted by the allocator of a processor, beside the model of memory.

What PyTorch's allocator never sees is left out on both sides: the runtime, what fragments, and what
a library of collectives takes for itself.
"""

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from chipb.chip import with_chips

from weft.comm.address import RankAddress
from weft.config.optim_sections import AdamWConfig
from weft.cost.memory import LIBRARY_BYTES, Overheads, memory_of_plan
from weft.diagnose.verify import Rehearsal, rehearsing, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.precision.roles import Tier
from weft.train.assemble import fill, initial


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stage, and the microbatches of a step."""

    recompute: str = "off"
    precision: str = "fp32"
    family: str = "llama"
    ranks: int = 1
    zero: ZeroLevel = 0
    state_tier: Tier = "device"
    param_tier: Tier = "device"
    samples: int = 2
    """Of a microbatch, for each rank."""
    microbatches: int = 2
    seq_len: int = 256
    layers: int = 4
    experts: ExpertsSpec | None = None
    d_model: int = 128
    """Twice as many where buckets, or chunks of tokens, are small beside what is counted."""

    def plan(self) -> Plan:
        axes = {"dp": self.ranks} if self.ranks > 1 else {}
        stage = StagePlan(
            mesh=Mesh.of(range(self.ranks), **axes),
            layers=(0, self.layers),
            precision=self.precision,
            recompute=self.recompute,
            zero=self.zero,
            state_tier=self.state_tier,
            param_tier=self.param_tier,
        )
        many = self.samples * self.ranks
        line = PipelinePlan(stages=(stage,), samples=self.microbatches * many, microbatch=many)
        return Plan(num_layers=self.layers, pipelines=(line,))

    def rehearsal(self, folder: str) -> Rehearsal:
        spec = next(iter(FAMILIES[self.family].sizes.values())).reduced()
        kv_heads = 4 if self.family == "llama" else 8
        spec = replace(spec, num_layers=self.layers, num_heads=8)
        spec = replace(spec, d_model=self.d_model, d_ff=2 * self.d_model, d_head=self.d_model // 8)
        spec = replace(spec, num_kv_heads=kv_heads, dropout=0.1 * (kv_heads == 8))
        spec = replace(spec, seq_len=self.seq_len, experts=self.experts)
        return Rehearsal(
            spec=spec, optim=AdamWConfig(state_folder=folder), seq_len=self.seq_len, seed=1
        )


MADE_AGAIN = (
    "off", "core", "attention", "activation", "feed_forward", "full", "full:3",
    "attention+activation", "core+full:2", "offload_disk", "full:2+offload_disk",
)  # fmt: skip
EXPERTS = ExpertsSpec(count=4, top_k=2, d_ff=256, shared_d_ff=128)
ROWS = [
    *(Row(recompute=text) for text in MADE_AGAIN),
    Row(recompute="full+chunks", samples=10, layers=8, d_model=256),
    Row(recompute="off", family="gpt2"),
    Row(recompute="attention+activation", family="gpt2"),
    Row(recompute="full", precision="bf16", samples=1, seq_len=64),
    *(Row(ranks=2, zero=level, d_model=256) for level in (0, 1)),
    *(Row(ranks=2, zero=level, layers=8, d_model=256) for level in (2, 3)),
    Row(ranks=2, zero=3, layers=8, recompute="core+full:2"),
    *(Row(experts=EXPERTS, recompute=text) for text in ("off", "activation", "feed_forward")),
    Row(state_tier="disk"),
    Row(precision="bf16", param_tier="disk", seq_len=128),
    Row(precision="bf16", param_tier="disk", state_tier="disk", seq_len=128),
    Row(microbatches=1),
    Row(microbatches=1, layers=8, d_model=256, seq_len=64),
    Row(microbatches=1, layers=8, d_model=256, samples=1, seq_len=128, recompute="full"),
    Row(microbatches=1, layers=8, d_model=256, family="gpt2"),
    Row(microbatches=1, precision="bf16", layers=8, d_model=256, seq_len=64),
    Row(microbatches=1, ranks=2, layers=8, d_model=256),
]  # fmt: skip


def named(row: Row) -> str:
    kept = f"state on {row.state_tier}, parameters on {row.param_tier}, zero {row.zero}"
    many = f"{row.microbatches} x {row.samples} x {row.seq_len}"
    model = f"{row.family} of {row.experts.count} experts" if row.experts else row.family
    return f"{model}, {row.precision}, {row.recompute}, {kept}, {row.ranks}, {many}"


def most(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> int:
    """Bytes of this rank at the peak of two steps, with one document a sample."""
    gc.collect()
    torch.ops.chipb.count()
    with rehearsing(address, plan, rehearsal) as (comm, built):
        fill(built.gradients, initial(1))
        for step in range(2):
            micros = synthetic_microbatches(comm, plan, rehearsal, step)
            whole = [replace(m, context=replace(m.context, documents=None)) for m in micros]
            built.engine.step(whole)
        built.gradients.fence()
    found: int = torch.ops.chipb.most_bytes()
    return found


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_as_the_model_has_it(row: Row, chips: WorkerPool, tmp_path: object) -> None:
    plan, rehearsal = row.plan(), row.rehearsal(str(tmp_path))
    found = chips.run(with_chips, most, plan, rehearsal, world_size=plan.world_size)
    told = memory_of_plan(plan, rehearsal.spec, row.seq_len, {"cpu": Overheads()})[0]
    divided = any(stage.zero >= 2 for _, _, stage in plan.stages())
    library = LIBRARY_BYTES if divided and row.ranks > 1 else 0
    assert max(found) == pytest.approx(told.total - told.fragments - library, rel=0.03)
