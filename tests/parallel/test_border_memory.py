"""Memory on borders is made in the first step, and given again only when nobody keeps it."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity.cases import PARITY, Case
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm import transport
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.comm.memory import ReusedMemory
from weft.cost.sends import message_part
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.nn.stage import MicroBatch, Tree
from weft.parallel.pipeline.executor import Executor
from weft.parallel.pipeline.stage_border import StageBorder, Way
from weft.plan.plan import Plan
from weft.schedules.action import Action
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.known import Pattern
from weft.schedules.registry import SCHEDULES
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan


def test_memory_is_given_again_once_nobody_keeps_it() -> None:
    memory = ReusedMemory(torch.device("cpu"))
    first = memory.take((2, 3), torch.float32)
    view = first[1:].requires_grad_()
    place = first.data_ptr()
    del first
    second = memory.take((2, 3), torch.float32)
    assert second.data_ptr() != place, "a view keeps it"
    weight = torch.ones(3, requires_grad=True)
    loss = (view * weight).sum()
    del view
    assert memory.take((2, 3), torch.float32).data_ptr() not in (place, second.data_ptr())
    assert memory.made == 3
    loss.backward()
    assert memory.take((2, 3), torch.float32).data_ptr() != place, "autograd has the leaf"
    del loss
    assert memory.take((2, 3), torch.float32).data_ptr() == place
    assert memory.take((2, 3), torch.float64).data_ptr() != place
    assert memory.take((3, 2), torch.float32).data_ptr() != place
    assert memory.made == 5
    memory.forget()
    memory.take((2, 3), torch.float32)
    assert memory.made == 6


def test_without_a_count_of_uses_nothing_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch may not say who refers to memory; then none is kept either."""
    monkeypatch.setattr("weft.comm.memory.USE_COUNT", None)
    memory = ReusedMemory(torch.device("cpu"))
    first = memory.take((2, 3), torch.float32)
    assert memory.take((2, 3), torch.float32).data_ptr() != first.data_ptr()
    assert memory.made == 2
    assert not memory._pieces


class Waits(TorchDispatchMode):
    """Counts what a program on a device would wait for: values that come to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "nonzero"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def steps(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> tuple[list[int], list[str]]:
    """What was made for borders after each of four steps, and what the last waited for."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    built.optimizer.is_host = False  # as on a device: there it does not look at numbers
    made = []
    batch = synthetic_microbatches(comm, plan, rehearsal, 0)
    for _ in range(3):
        built.engine.step(batch)
        made.append(built.executor.border_memory.made)
    with Waits() as waits:
        built.engine.step(batch)
    made.append(built.executor.border_memory.made)
    comm.close()
    return made, waits.names


def through_host(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> list[int]:
    """Rooms of the host for messages: before training, and after each of two steps."""
    comm = join(address, backend="none", device=torch.device("cpu"), timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    assert comm._host_copies is not None
    made = [comm._host_copies.rooms.made]
    for number in range(2):
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, number))
        made.append(comm._host_copies.rooms.made)
    comm.close()
    return made


def test_memory_of_the_host_is_made_before_training(pool: WorkerPool) -> None:
    plan = CASES[0].plan()
    for made in pool.run(through_host, plan, CASES[0].rehearsal(), world_size=plan.world_size):
        assert made[0] > 0
        assert made == made[:1] * 3


def on_seams(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> list[tuple[int, int]]:
    """Tensors of the host that its copies made, by each of six steps, and those that sums took
    elsewhere."""
    comm = join(address, backend="none", device=torch.device("cpu"), timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    copies, like = comm._host_copies, torch.empty_like
    assert copies is not None
    elsewhere, found = [], []

    def counted(*given: Any, **settings: Any) -> torch.Tensor:
        if sys._getframe(1).f_code is transport._new.__code__:
            elsewhere.append(0)
        return like(*given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", counted)
        before = copies.rooms.made + copies.calls.made
        for number in range(6):
            built.engine.step(synthetic_microbatches(comm, plan, rehearsal, number))
            made = copies.rooms.made + copies.calls.made
            found.append((made - before, len(elsewhere)))
            before = made
    built.gradients.fence()  # who leaves while parameters are on their way lets others wait
    comm.close()
    return found


def test_collectives_through_the_host_make_no_memory_after_two_steps(pool: WorkerPool) -> None:
    """Sums and gathers inside layers, of gradients and of parameters. The library may be late to
    let go of one, now and then."""
    case = Case("seams", shares=(6,), dp=((2,),), tp=((2,),), zero=2, microbatch=1)
    for found in pool.run(on_seams, case.plan(), case.rehearsal(), world_size=4):
        made = [count for count, _ in found]
        assert made[0] > 0
        assert min(made[2:]) == 0, made
        assert sum(made[2:]) <= 3, made
        assert found[-1][1] == 0, "what sums receive is made for every call"


CASES = [
    Case("wide", shares=(9,), dp=((2, 1),), layers=((2, 2),), microbatch=2),
    Case("zb-v", shares=(5,), dp=((1, 1),), layers=((1, 1, 1, 1),), microbatch=1, schedule="zb-v"),
    Case("tied zero3", shares=(6,), dp=((2, 1),), layers=((2, 2),), tied=True, zeros=(3, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_makes_no_memory_on_borders_and_waits_for_no_number(
    case: Case, pool: WorkerPool
) -> None:
    plan = case.plan()
    for made, waits in pool.run(steps, plan, case.rehearsal(), world_size=plan.world_size):
        assert made[0] > 0
        assert made[1:] == [made[1]] * 3
        assert waits == []


def at_borders(address: RankAddress, plan: Plan, rehearsal: Rehearsal, message: float) -> float:
    """The most tensors that were there at the borders in a third step while a rank kept most
    microbatches, beside the inputs of those; messages in bytes count as that part of one."""
    seen: dict[StorageWeakRef, float] = {}
    moments: list[tuple[int, float]] = []
    take, send, do = ReusedMemory.take, StageBorder.send, Executor._do

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        counts = message if tensor.dtype == torch.uint8 else 1
        seen[StorageWeakRef(tensor.untyped_storage())] = counts
        return tensor

    def sent(border: StageBorder, way: Way, number: int, tree: Tree) -> None:
        tree = {name: noted(tensor) for name, tensor in tree.items()}
        send(border, way, number, tree)

    def done(executor: Executor, action: Action, batch: MicroBatch) -> None:
        if action.kind == "F":
            do(executor, action, batch)
        kept, halves = executor._kept, executor._weight_jobs
        there = {ref.cdata: counts for ref, counts in seen.items() if not ref.expired()}
        inputs = sum(stage > 0 for stage, _ in kept)
        moments.append((len(kept) + sum(map(bool, halves.values())), sum(there.values()) - inputs))
        if action.kind != "F":
            do(executor, action, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReusedMemory, "take", lambda *given: noted(take(*given)))
        patch.setattr(StageBorder, "send", sent)
        patch.setattr(Executor, "_do", done)
        comm, _ = join_plan(address, plan, timeout_s=600)
        built = assemble_model(
            plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
        )
        fill(built.gradients, initial(rehearsal.seed))
        batch = synthetic_microbatches(comm, plan, rehearsal, 0)
        for _ in range(3):
            moments.clear()
            built.engine.step(batch)
        comm.close()
    return max(moments)[1]


LINE = ((1, 1, 1, 1),)
COUNTED = [
    Case("1f1b", shares=(9,), dp=LINE, layers=LINE, microbatch=1),
    Case("deeper", shares=(9,), dp=((1, 1),), layers=((2, 2),), microbatch=1, in_flight=(5, 2)),
    Case("gpipe", shares=(9,), dp=((1, 1),), layers=((2, 2),), microbatch=1, schedule="gpipe"),
    Case("ring", shares=(6,), dp=((1, 1, 1),), layers=((1,) * 6,), microbatch=1,
         schedule="interleaved"),
    Case("zb-v", shares=(7,), dp=((1, 1),), layers=LINE, microbatch=1, schedule="zb-v"),
    Case("zb-v in eight bits", shares=(7,), dp=((1, 1),), layers=LINE, microbatch=1,
         schedule="zb-v", precision="fp8-rowwise-fp64"),
    *(case for case in PARITY if case.name in ("pp3-lists-halves", "pp2-lists-v")),
    Case("1f1b cast", shares=(9,), dp=LINE, layers=LINE, microbatch=1, border="fp8"),
    Case("zb-v cast", shares=(7,), dp=((1, 1),), layers=LINE, microbatch=1, schedule="zb-v",
         border="fp8"),
]  # fmt: skip


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_as_much_is_at_borders_as_the_schedule_says(case: Case, pool: WorkerPool) -> None:
    layers, rehearsal = sum(case.layers[0]), case.rehearsal()
    plan = replace(case.plan(), num_layers=layers)
    rehearsal = replace(rehearsal, spec=replace(rehearsal.spec, num_layers=layers))
    message = message_part(plan.pipelines[0], rehearsal.spec.d_model)
    found = pool.run(at_borders, plan, rehearsal, message, world_size=plan.world_size)
    assert found == pytest.approx(borders_at_peak(Pattern.of(plan.pipelines[0]), message))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_deep_pipelines_are_told_from_few_positions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not counted in their lists is what would be."""
    chunks = SCHEDULES[name].chunks
    deep = [Pattern(name, number, number * chunks, 100) for number in (7, 8, 9, 12, 17, 24)]
    told = [borders_at_peak(pattern) for pattern in deep]
    monkeypatch.setattr("weft.schedules.border_memory._grows_evenly", lambda _: False)
    borders_at_peak.cache_clear()
    assert told == [borders_at_peak(pattern) for pattern in deep]
    borders_at_peak.cache_clear()
