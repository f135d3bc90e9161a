"""What each way to save memory keeps, counted tensor by tensor, beside what plans count with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.sections import AdamWConfig
from weft.cost.activations import stage_kept
from weft.cost.choice import choice_of
from weft.cost.memory import memory_of_plan
from weft.data.synthetic import SyntheticDataset
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES, shape_of
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.precision.roles import Tier
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut
from weft.train.profiling import storages

SEQ, SAMPLES = 128, 4
SMALL = FAMILIES["llama"].sizes["debug-1m"].reduced()
SPEC: ModelSpec = replace(
    SMALL, num_layers=6, d_model=256, d_ff=704, num_heads=4, num_kv_heads=4, d_head=64, seq_len=SEQ
)
"""So large that norms, tables of positions and room behind the last piece hardly count."""


def made(ranks: int = 1, **settings: object) -> Plan:
    stage = StagePlan(
        mesh=Mesh.of(range(ranks), dp=ranks),
        layers=(0, SPEC.num_layers),
        **settings,  # type: ignore[arg-type]
    )
    line = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
    return Plan(num_layers=SPEC.num_layers, pipelines=(line,))


def assembled(plan: Plan, comm: Comm) -> Built:
    built = assemble_model(plan, SPEC, comm, optim=AdamWConfig(), seq_len=SEQ)
    fill(built.gradients, initial(1))
    return built


def kept_for_backward(plan: Plan) -> int:
    """Bytes of a forward in this process's memory, each storage once, parameters apart."""
    built = assembled(plan, Comm())
    (stage,) = built.stages.values()
    own = {param.untyped_storage().data_ptr() for param in stage.module.parameters()}
    own |= {each.untyped_storage().data_ptr() for each in stage.module.buffers()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=SEQ, seed=2).batch(range(SAMPLES))
    (micro,) = cut(batch, [SAMPLES], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.compute(micro.tensors, micro.context)
    return sum(
        tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in own
    )


MODES = ("off", "core", "activation", "attention", "feed_forward", "full", "full:3", "core+full:2")


@pytest.mark.parametrize("mode", MODES)
def test_recompute(mode: str) -> None:
    plan = made(recompute=mode)
    work = choice_of(plan.pipelines[0], 0, SEQ).work
    assert kept_for_backward(plan) == pytest.approx(stage_kept(shape_of(SPEC), work), rel=0.03)


def at_rest(address: RankAddress, plan: Plan) -> tuple[float, float]:
    """Bytes of state after a step, counted and as planned."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assembled(plan, comm)
    batch = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=SEQ, seed=2)
    (held,) = plan.rank_plan(comm.rank).microbatches()
    (micro,) = cut(batch.batch(held), [len(held)], torch.device("cpu"))
    built.engine.step([micro])
    built.gradients.fence()
    kinds = storages(SimpleNamespace(built=built))  # type: ignore[arg-type]
    kinds["gradients"] = {0: built.gradients.kept_bytes}
    told = memory_of_plan(plan, SPEC, SEQ)[comm.rank]
    comm.close()
    return sum(sum(of_kind.values()) for of_kind in kinds.values()), told.state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_levels_of_zero(zero: ZeroLevel, precision: str, pool: WorkerPool) -> None:
    plan = made(2, zero=zero, precision=precision)
    for counted, told in pool.run(at_rest, plan, world_size=2):
        assert counted == pytest.approx(told, rel=0.03)


@pytest.mark.parametrize(("state", "params"), [("disk", "device"), ("disk", "disk")])
def test_offload(state: Tier, params: Tier, pool: WorkerPool) -> None:
    """Of one rank: two units of parameters come and go, and rooms for pieces."""
    plan = made(precision="bf16", state_tier=state, param_tier=params)
    ((counted, told),) = pool.run(at_rest, plan, world_size=1)
    rooms = memory_of_plan(plan, SPEC, SEQ)[0].buffers
    assert counted == pytest.approx(told + rooms, rel=0.03)
