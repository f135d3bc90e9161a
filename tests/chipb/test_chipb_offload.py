"""Activations of a chip that wait on the host: not one bit differs, whatever else a plan does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chipb.chip import NAME, with_chips
from chipb.test_chipb_jobs import on
from parity.cases import STEPS, Case
from torch.autograd.graph import saved_tensors_hooks

from weft.comm.address import RankAddress
from weft.config.optim_sections import SgdConfig
from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import rehearse
from weft.elastic.pool import WorkerPool
from weft.memory.parcels import Parcel, ToHost
from weft.models.registry import FAMILIES
from weft.nn.offloaded import offload
from weft.nn.stage import Unit
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut

GPT2 = {"family": "gpt2", "dropout": 0.2, "shares": (6,)}
CASES = [
    (
        Case("1f1b", dp=((1, 1),), layers=((3, 1),), **GPT2),
        ("offload", "attention+offload:2", "offload_disk"),
    ),
    (
        Case("zb-h1-tp2", dp=((1, 1),), tp=((1, 2),), layers=((2, 2),), schedule="zb-h1", **GPT2),
        ("full:1+offload",),
    ),
    (Case("zero3-passes", shares=(6,), dp=((2,),), zero=3, passes=2, tied=True), ("offload_disk",)),
    (
        Case("zb-v", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="zb-v"),
        ("offload",),
    ),
]


@pytest.mark.parametrize(("case", "modes"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_not_one_bit_differs(case: Case, modes: tuple[str, ...], chips: WorkerPool) -> None:
    def run(job: object, *args: object, world_size: int) -> list:
        return chips.run(with_chips, job, *args, world_size=world_size)

    def trace(mode: str) -> Any:
        plan = replace(case, recompute=mode).plan()
        words = " ".join([NAME] * len(plan.pipelines[0].positions()))
        return rehearse(run, on(plan, words), replace(case.rehearsal(), steps=STEPS))

    usual = trace("off")
    for mode in modes:
        found = trace(mode)
        assert found.losses == usual.losses, mode
        for ours, theirs in ((found.grads, usual.grads), (found.params, usual.params)):
            assert ours.keys() == theirs.keys()
            for name, values in ours.items():
                assert np.array_equal(values, theirs[name], equal_nan=True), (mode, name)


def viewed(address: RankAddress) -> tuple[list[float], int]:
    """Gradients behind two views of one storage that went away, and how many storages did."""
    x = torch.arange(24.0).to(NAME).requires_grad_()
    ways = ToHost(torch.device(NAME, address.local_rank))
    parcel = Parcel(ways, [x], None)
    with saved_tensors_hooks(parcel.pack, parcel.unpack):
        rows = (x * x).view(4, 6)
        total = (rows[1:3, ::2].t() * rows[2:, 1::2].t()).sum()
    parcel.leave()
    Parcel(ways, [], None).leave()
    assert all(store.here is None for store in parcel.stores)
    number = len(list(parcel.stores))
    total.backward()
    assert x.grad is not None
    return x.grad.cpu().tolist(), number


def test_views_come_back_as_they_were(chips: WorkerPool) -> None:
    found, number = chips.run(with_chips, viewed, world_size=1)[0]
    x = torch.arange(24.0).requires_grad_()
    rows = (x * x).view(4, 6)
    (rows[1:3, ::2].t() * rows[2:, 1::2].t()).sum().backward()
    assert x.grad is not None
    assert found == x.grad.tolist()
    assert number == 1


def held(address: RankAddress, mode: str, layers: int) -> tuple[int, int]:
    """Bytes of the chip at the peak of a step, and on the host for a microbatch."""
    device, lent = torch.device(NAME, 0), []
    spec = replace(FAMILIES["llama"].sizes["debug-1m"].reduced(), num_layers=layers)
    stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, layers), device=NAME, recompute=mode)
    line = PipelinePlan(stages=(stage,), samples=16, microbatch=16)
    plan = Plan(num_layers=layers, pipelines=(line,))
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(plan, spec, comm, optim=SgdConfig(), seq_len=256)
    fill(built.gradients, initial(1))
    batch = SyntheticDataset(vocab_size=spec.vocab_size, seq_len=256, seed=2).batch(range(16))
    (micro,) = cut(batch, [16], device)
    leave = Parcel.leave

    def leaves(parcel: Parcel) -> None:
        leave(parcel)
        lent.append(sum(store.there.nbytes for store in parcel.stores if store.there is not None))

    torch.ops.chipb.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parcel, "leave", leaves)
        built.engine.step([micro])
    comm.close()
    return torch.ops.chipb.peak_bytes(), sum(lent)


def test_two_layers_are_on_the_chip_at_a_time(library: Path) -> None:
    """As the model of memory has it. A process knows the most that it ever held: less first."""
    layers = 6
    with WorkerPool() as pool:
        (found, away), (usual, none) = (
            pool.run(with_chips, held, mode, layers, world_size=1)[0] for mode in ("offload", "off")
        )
    assert none == 0
    assert usual - found == pytest.approx(away * (layers - 2) / layers, rel=0.03)


def under_way(address: RankAddress) -> int:
    """The most parcels that are on the chip at a time, three micro-batches ahead as 1F1B has."""
    device, parcels, most = torch.device(NAME, address.local_rank), list[Parcel](), 0
    blocks = [torch.nn.Linear(64, 64).to(device) for _ in range(4)]
    units = [Unit(lambda x, block=block: block(x * x), block=block) for block in blocks]
    offload(units, ToHost(device))
    leave, arrive = Parcel.leave, Parcel.arrive

    def count() -> None:
        nonlocal most
        here = [any(store.here is not None for store in each.stores) for each in parcels]
        most = max(most, sum(here))

    def leaves(parcel: Parcel) -> None:
        parcels.append(parcel)
        leave(parcel)
        count()

    def arrives(parcel: Parcel) -> None:
        arrive(parcel)
        count()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parcel, "leave", leaves)
        patch.setattr(Parcel, "arrive", arrives)
        ahead = list[torch.Tensor]()
        for _ in range(6):
            x = torch.ones(8, 64).to(device).requires_grad_()
            for unit in units:
                x = unit(x)
            ahead.append(x.sum())
            if len(ahead) == 3:
                ahead.pop(0).backward()
    return most


def test_two_layers_are_on_the_chip_however_many_are_under_way(chips: WorkerPool) -> None:
    assert chips.run(with_chips, under_way, world_size=1) == [2]
