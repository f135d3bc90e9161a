"""Optimizers: AdamW is PyTorch's bit for bit, and any rule is exact however tensors are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.toy_rules import SignConfig, TrustConfig, trust_ratio
from parity.cases import Case
from parity.test_parity import TOLERANCE
from torch import Tensor, nn
from train.test_gradients import gradients_of

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.optim_sections import (
    AdamWConfig,
    CosineSchedule,
    OptimConfig,
    ParamGroupConfig,
    SgdConfig,
)
from weft.config.sections import BatchConfig, Config, DataConfig
from weft.cost.memory import stage_params
from weft.cost.work import Training
from weft.diagnose.verify import (
    Rehearsal,
    difference,
    one_process,
    rehearse,
    synthetic_microbatches,
)
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs, shape_of
from weft.optim.optimizer import Optimizer
from weft.optim.registry import OPTIMIZERS, rule_of, training_of
from weft.plan.plan import Plan
from weft.platform.cpu import CpuPlatform
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import Run
from weft.train.saving import restore, save

SCHEDULE = CosineSchedule(warmup=0)
TOYS = [
    SignConfig(lr=0.003, schedule=SCHEDULE),
    TrustConfig(lr=0.02, schedule=SCHEDULE),
    SgdConfig(lr=0.05, schedule=SCHEDULE),
]
SPLITS = [
    Case("dp2", shares=(6,), dp=((2,),)),
    Case("tp2", shares=(6,), dp=((1,),), tp=((2,),)),
    Case("pp2-tied", shares=(6,), dp=((1, 1),), layers=((2, 2),), tied=True),
    *(Case(f"zero{level}", shares=(6,), dp=((2,),), zero=level) for level in (1, 3)),
    Case("zero2-uneven", shares=(6,), dp=((3,),), zero=2, state_shares=((0, 1, 7),)),
    Case("unlike-pipelines-zero2", shares=(4, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1, 3), (4,)), zero=2),
    Case("first-rank-keeps-nothing", shares=(6,), dp=((1, 1, 1),), layers=((1, 0, 3),),
         order=(1, 0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("optim", TOYS, ids=lambda optim: optim.kind)
@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
def test_every_split_is_exact(case: Case, optim: OptimConfig, pool: WorkerPool) -> None:
    rehearsal, plan = replace(case.rehearsal(), optim=optim), case.plan()
    alone = rehearse(pool.run, one_process(plan), rehearsal)
    assert len(set(alone.losses)) == rehearsal.steps
    found = difference(alone, rehearse(pool.run, plan, rehearsal))
    assert found.largest < TOLERANCE, found


class Two(nn.Module):
    """A matrix and a vector, and a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.vector = nn.Parameter(torch.randn(7))

    def forward(self) -> Tensor:
        return (self.matrix @ self.vector).sin().sum()


def ours(
    optim: OptimConfig, factors: list[float], model: nn.Module, precision: str = "fp32"
) -> Optimizer:
    """One update for each factor."""
    gradients = gradients_of(model, Comm(), precision=precision)
    optimizer = Optimizer(optim, gradients)
    for step, factor in enumerate(factors):
        optimizer.lr = optim.lr / (1 + step)
        gradients.begin(1)
        model().backward()
        gradients.finish()
        optimizer.update(torch.tensor(factor, dtype=torch.float64))
    return optimizer


def pytorch_s(
    reference: torch.optim.Optimizer, lr: float, factors: list[float], model: nn.Module
) -> None:
    """The updates of ``ours`` by PyTorch's optimizer, which a factor of 0 does not even ask."""
    for step, factor in enumerate(factors):
        reference.param_groups[0]["lr"] = lr / (1 + step)
        reference.zero_grad()
        model().backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad *= factor
        if factor:
            reference.step()


FACTORS = [1.0, 0.0, 0.3, 1.0]


@pytest.mark.parametrize(
    ("optim", "build"),
    [
        (
            AdamWConfig(lr=0.1, weight_decay=0.0),
            lambda params: torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0, fused=True),
        ),
        (
            SgdConfig(lr=0.1, momentum=0.7),
            lambda params: torch.optim.SGD(params, momentum=0.7),
        ),
        (SgdConfig(lr=0.1, momentum=0.0), torch.optim.SGD),
    ],
    ids=["adamw", "sgd", "sgd-plain"],
)
def test_bits_are_those_of_pytorch(
    optim: OptimConfig, build: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Where the factor is 0 PyTorch's is not asked at all, and later steps do not show it."""
    model, theirs = Two(), Two()
    optimizer = ours(optim, FACTORS, model)
    pytorch_s(build(theirs.parameters()), optim.lr, FACTORS, theirs)
    assert torch.equal(model.matrix, theirs.matrix)
    assert torch.equal(model.vector, theirs.vector)
    assert optimizer.num_updates == 3


def test_fused_updates_are_those_of_single_operations() -> None:
    """In double precision, beside PyTorch's AdamW of one operation after another."""
    model, theirs = Two().double(), Two().double()
    ours(AdamWConfig(lr=0.1, weight_decay=0.0), FACTORS, model, "fp64")
    plain = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0, foreach=False)
    pytorch_s(plain, 0.1, FACTORS, theirs)
    for fused, single in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(fused, single, rtol=1e-12, atol=1e-14)
    assert not torch.equal(model.matrix, Two().double().matrix)


@pytest.mark.parametrize("optim", [AdamWConfig(lr=0.1), *TOYS], ids=lambda optim: optim.kind)
def test_a_batch_without_weight_changes_no_bit(optim: OptimConfig) -> None:
    """Not even where its gradients are no numbers."""
    model = Two()
    optimizer = ours(optim, [1.0, 1.0], model)
    states = [states for group in optimizer.groups for states in group.states.values()]
    kept = [model.matrix, model.vector, *(state for each in states for state in each)]
    before = [tensor.detach().clone() for tensor in kept]
    assert all(tensor.any() for tensor in before)
    for main in optimizer.groups[0].mains:
        assert main.grad is not None
        main.grad.fill_(torch.nan)
    optimizer.update(torch.zeros((), dtype=torch.float64))
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
    assert optimizer.num_updates == 2


def save_halfway(address: RankAddress, plan: Plan, rehearsal: Rehearsal, root: Path) -> list[float]:
    """Two steps, a checkpoint, two more steps: the losses after it."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    for step in range(2):
        built.engine.step(synthetic_microbatches(comm, plan, rehearsal, step))
    save(run_of(built, comm, plan, rehearsal), root, 2, fingerprint="same")
    found = losses_after(built, comm, plan, rehearsal)
    comm.close()
    return found


def load_halfway(
    address: RankAddress, plan: Plan, rehearsal: Rehearsal, roots: list[Path]
) -> list[list[float]]:
    """The losses after each checkpoint; all but the first load into a run that has gone on."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    found = []
    for root in roots:
        restore(built, open_checkpoint(root))
        found.append(losses_after(built, comm, plan, rehearsal))
    comm.close()
    return found


def losses_after(built: Built, comm: Comm, plan: Plan, rehearsal: Rehearsal) -> list[float]:
    batches = (synthetic_microbatches(comm, plan, rehearsal, step) for step in (2, 3))
    found = [float(built.engine.step(batch).loss) for batch in batches]
    built.gradients.fence()
    return found


def run_of(built: Built, comm: Comm, plan: Plan, rehearsal: Rehearsal) -> Run:
    return Run(
        config=Config(data=DataConfig(path="none"), batch=BatchConfig(samples=6, micro=1)),
        plan=plan,
        spec=rehearsal.spec,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=iter(()),
        first_step=0,
        last_step=2,
    )


OURS = [kind.config() for kind in OPTIMIZERS.values() if kind.config is not None]


@pytest.mark.parametrize("optim", [*TOYS, *OURS, SgdConfig(momentum=0.0)], ids=repr)
def test_predictions_know_what_an_optimizer_keeps(optim: OptimConfig) -> None:
    """What its entry says is what its rule keeps; frozen parameters count apart."""
    params = param_specs(SIZES["debug-1m"])
    kept = sum(
        prod(param.shape[dim] for dim in dims)
        for param in params
        for dims in rule_of(optim).state(param).values()
    )
    training = training_of(optim, params)
    assert training.moments == pytest.approx(kept / sum(param.numel for param in params))
    assert training == Training(
        training.moments, by_element=training.by_element, moved_bytes=training.moved_bytes
    )
    frozen = ParamGroupConfig(params="layers.1.*", trainable=False)
    some = training_of(optim.model_copy(update={"groups": (frozen,)}), params)
    assert some.units[:4] == (1, 1, 0, 1) and some.parts((0, 4)) == (1, 0.75, 1)
    shape = shape_of(SIZES["debug-1m"])
    for layers in ((0, 1.5), (1.5, 3)):  # half of layer 1 beside one that is trained
        held, _ = stage_params(shape, layers, (), embeds=False, predicts=False)
        assert some.parts(layers)[1] * held == pytest.approx(shape.dense_params(0))


STATES = {"sign": {"direction"}, "trust": {"direction", "trust"}, "sgd": {"momentum"}}


@pytest.mark.parametrize("optim", TOYS, ids=lambda optim: optim.kind)
def test_checkpoints_hold_what_an_optimizer_names(
    optim: OptimConfig, pool: WorkerPool, tmp_path: Path
) -> None:
    """Also one number a tensor, written once and found by every piece of another split.

    Every split loads the rule that keeps both kinds of state; the others cross between two.
    """
    plain = [case for case in SPLITS if not case.tied]
    if optim.kind != "trust":
        plain = plain[-2:]
    losses = {}
    for case in plain[-2:]:
        rehearsal, plan = replace(case.rehearsal(), optim=optim), case.plan()
        root = tmp_path / case.name
        ranks = pool.run(save_halfway, plan, rehearsal, root, world_size=plan.world_size)
        losses[case.name] = ranks[0]
        assert set(open_checkpoint(root).kinds) == {"param", *STATES[optim.kind]}
    for case in plain:
        rehearsal, plan = replace(case.rehearsal(), optim=optim), case.plan()
        roots = [tmp_path / name for name in losses]
        ranks = pool.run(load_halfway, plan, rehearsal, roots, world_size=plan.world_size)
        for (name, expected), found in zip(losses.items(), ranks[0], strict=True):
            assert found == pytest.approx(expected, rel=1e-10), f"{name} -> {case.name}"
    if optim.kind == "trust":
        checkpoint = open_checkpoint(tmp_path / plain[-1].name)
        assert checkpoint.shape("layers.0.attn.q.weight", "trust") == ()
        assert float(checkpoint.read("layers.0.attn.q.weight", "trust")) > 0


def test_norms_are_of_what_they_say() -> None:
    """One step by hand."""
    model, fresh = Two(), Two()
    optim = TrustConfig(lr=0.1)
    ours(optim, [0.5], model)
    fresh().backward()
    for param, updated in ((fresh.matrix, model.matrix), (fresh.vector, model.vector)):
        assert param.grad is not None
        grad = param.grad * 0.5
        ratio = trust_ratio(*(x.double().square().sum() for x in (param, grad, grad)))
        expected = param - 0.1 * 0.5 * ratio * grad  # the running mean starts at zero
        torch.testing.assert_close(updated, expected, rtol=1e-5, atol=1e-6)
