"""Parameters of a chip that wait on the host: not one bit differs, and they are not on the chip."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chipb.chip import NAME, with_chips
from chipb.test_chipb_jobs import on
from parity.cases import STEPS, Case

from weft.comm.address import RankAddress
from weft.config.optim_sections import AdamWConfig
from weft.cost.memory import memory_of_plan
from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import rehearse
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES, shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.precision.roles import Tier
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut

SPEC = FAMILIES["llama"].sizes["debug-1m"].reduced()
SPEC = replace(SPEC, num_layers=8, d_model=256, d_ff=512, num_heads=4, d_head=64)
SEQ_LEN = 2
"""Few: the model of memory is of fused norms and compiled gates, which the chip has not."""

CASES = [
    Case("alone-gpt2", shares=(6,), family="gpt2", dropout=0.2, recompute="offload"),
    Case("zero3-tp2", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3, zero=3, recompute="full"),
    Case("zb-h1-tied", shares=(6,), dp=((1, 1),), layers=((3, 1),), schedule="zb-h1", tied=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_not_one_bit_differs(case: Case, chips: WorkerPool) -> None:
    def run(job: object, *args: object, world_size: int) -> list:
        return chips.run(with_chips, job, *args, world_size=world_size)

    plan = replace(case, precision="bf16").plan()
    plan = on(plan, " ".join([NAME] * len(plan.pipelines[0].positions())))
    tiers = [("device", "device"), ("host", "disk"), ("disk", "device")]
    if case is CASES[0]:
        tiers += [("host", "device"), ("host", "host"), ("disk", "disk"), ("device", "host")]

    def trace(params: str, state: str) -> Any:
        kept = plan.each(lambda stage: replace(stage, param_tier=params, state_tier=state))
        return rehearse(run, kept, replace(case.rehearsal(), steps=STEPS))

    usual, *others = (trace(*both) for both in tiers)
    for found in others:
        assert found.losses == usual.losses
        for ours, theirs in ((found.grads, usual.grads), (found.params, usual.params)):
            assert ours.keys() == theirs.keys()
            for name, values in ours.items():
                assert np.array_equal(values, theirs[name], equal_nan=True), name


def alone(params: Tier, state: Tier) -> Plan:
    stage = StagePlan(
        mesh=Mesh.of((0,)),
        layers=(0, 8),
        device=NAME,
        precision="bf16",
        param_tier=params,
        state_tier=state,
    )
    line = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    return Plan(num_layers=8, pipelines=(line,))


def most(address: RankAddress, tiers: tuple[Tier, Tier]) -> int:
    """Bytes of the chip at the peak of forwards and backwards."""
    comm, _ = join_plan(address, alone(*tiers), timeout_s=600)
    built = assemble_model(alone(*tiers), SPEC, comm, optim=AdamWConfig(), seq_len=SEQ_LEN)
    fill(built.gradients, initial(1))
    batch = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=SEQ_LEN, seed=2).batch(range(1))
    (micro,) = cut(batch, [1], torch.device(NAME, 0))
    built.executor.train([micro])
    comm.close()
    peak: int = torch.ops.chipb.peak_bytes()
    return peak


def test_two_layers_are_on_the_chip_at_a_time(library: Path) -> None:
    """As the model of memory has it. A process knows the most that it ever held: less first."""
    every: list[tuple[Tier, Tier]] = [("host", "host"), ("disk", "device"), ("device", "device")]
    with WorkerPool() as pool:
        away, *peaks = [pool.run(with_chips, most, tiers, world_size=1)[0] for tiers in every]
    for (params, state), peak in zip(every, (away, *peaks), strict=True):
        told = memory_of_plan(alone(params, state), SPEC, SEQ_LEN)[0]
        masters = told.optimizer / 3  # the rest comes with the first update
        pieces = 16 * shape_of(SPEC).params * (state == "host")  # which come with it too
        told = replace(told, runtime=0.0, optimizer=masters, buffers=told.buffers - pieces)
        assert peak == pytest.approx(told.total, rel=0.03)
    told = memory_of_plan(alone("host", "host"), SPEC, SEQ_LEN)[0]
    assert told.state == 0
    # Gradients and masters in four bytes each: no part of either waits on the chip.
    assert peaks[0] - away == pytest.approx(8 * shape_of(SPEC).params, rel=0.03)
