"""Optimizer state and master weights on disk: not one bit differs, and memory is as predicted."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.cases import Case

from weft.comm.address import RankAddress
from weft.config.optim_sections import OptimConfig
from weft.cost import memory as cost
from weft.cost.memory import memory_of_plan
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.memory.kept import is_apart
from weft.optim import pieces
from weft.optim.registry import OPTIMIZERS
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.profiling import storages

CPU = torch.device("cpu")


def trained(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> dict[str, Any]:
    """All bits that two steps leave, in pieces of which there are many."""
    cost.PIECE_BYTES = pieces.PIECE_BYTES = 1 << 13
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    for step in range(2):
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, step))
    built.gradients.fence()
    tensors = {}
    for main in built.gradients.mains:
        key = f"{main.spec.name} {main.box}"
        tensors[key] = main.value
        tensors |= {f"{key} {n}": t for n, (_, t) in built.optimizer.owned(main).items()}
    losses = built.executor.evaluate(synthetic_microbatches(comm, plan, rehearsal, 2))
    kept = sum(sum(of_kind.values()) for of_kind in storages(SimpleNamespace(built=built)).values())
    predicted = memory_of_plan(plan, rehearsal.spec, rehearsal.seq_len)[comm.rank]
    comm.close()
    return {
        "kept": kept,
        "predicted": predicted.state + predicted.buffers,
        "bits": {
            name: tensor.detach().double().numpy().tolist() for name, tensor in tensors.items()
        },
        "after": losses.tolist(),
        "apart": sum(t.nbytes for t in tensors.values() if is_apart(t, CPU)),
        "all": sum(t.nbytes for t in tensors.values()),
    }


OPTIMS = [kind.config() for kind in OPTIMIZERS.values() if kind.config]
CASES = [
    Case("one", shares=(4,), precision="bf16"),
    *(Case(f"zero{z}", shares=(6,), dp=((2,),), zero=z, precision="bf16") for z in (1, 2, 3)),
    Case("tp2", shares=(4,), tp=((2,),), dp=((1,),), precision="fp32"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.kind)
def test_not_one_bit_differs(case: Case, optim: OptimConfig, pool: WorkerPool) -> None:
    plan, rehearsal = case.plan(), replace(case.rehearsal(), optim=optim)
    away = plan.each(lambda stage: replace(stage, state_tier="disk"))
    both = [pool.run(trained, each, rehearsal, world_size=plan.world_size) for each in (plan, away)]
    for usual, disk in zip(*both, strict=True):
        assert disk["bits"] == usual["bits"]
        assert disk["after"] == usual["after"]
        assert usual["apart"] == 0
        if case.precision == "bf16":
            assert disk["apart"] == disk["all"]
        if case.name == "one" and optim.kind == "adamw":
            for found in (usual, disk):
                assert found["kept"] == pytest.approx(found["predicted"], rel=0.03)
            assert disk["kept"] < 0.6 * usual["kept"]
