"""Adafactor and Muon: PyTorch's numbers, and the same however tensors are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.test_rules import FACTORS, SCHEDULE, Two, load_halfway, ours, pytorch_s, save_halfway
from parity.cases import Case
from parity.test_parity import TOLERANCE
from torch import Tensor

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.optim_sections import REHEARSAL_EPS, OptimConfig, ParamGroupConfig
from weft.diagnose.reference import by_reference
from weft.diagnose.verify import difference, one_process, rehearse
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.optim.adafactor.config import AdafactorConfig
from weft.optim.muon.config import MuonConfig
from weft.optim.muon.rule import Muon, is_matrix, orthogonal
from weft.optim.registry import training_of
from weft.optim.rule import Group, Update
from weft.parallel.mains import MainParam
from weft.parallel.norms import TensorNorms
from weft.parallel.params import Held
from weft.parallel.wholes import WholeTensors
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec

CLOSE = {"rtol": 2e-5, "atol": 1e-6}
"""fp32, of steps near 0.1: sums of squares are fp64 here, and in other orders there."""
PUBLISHED = [
    AdafactorConfig(lr=0.05, schedule=SCHEDULE).rehearsed(REHEARSAL_EPS),
    MuonConfig(lr=0.02, schedule=SCHEDULE).rehearsed(REHEARSAL_EPS),
]
SPLITS = [
    Case("tp2", shares=(6,), dp=((1,),), tp=((2,),)),
    Case("dp2-zero3-uneven", shares=(6,), dp=((2,),), zero=3, state_shares=((1, 5),)),
    Case("pp2-tied", shares=(6,), dp=((1, 1),), layers=((2, 2),), tied=True),
    Case("unlike-pipelines-zero2", shares=(4, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1, 3), (4,)), zero=2, state_shares=((0, 2), (0, 1, 3))),
]  # fmt: skip


@pytest.mark.parametrize("optim", PUBLISHED, ids=lambda optim: optim.kind)
def test_every_split_is_exact(optim: OptimConfig, pool: WorkerPool) -> None:
    """One process against tensor parallelism, ZeRO, stages, and all of them unlike."""
    traces = {}
    for case in SPLITS:
        rehearsal, plan = replace(case.rehearsal(), optim=optim), case.plan()
        key = case.tied
        if key not in traces:
            traces[key] = rehearse(pool.run, one_process(plan), rehearsal)
            assert len(set(traces[key].losses)) == rehearsal.steps
        found = difference(traces[key], rehearse(pool.run, plan, rehearsal))
        assert found.largest < TOLERANCE, (case.name, found)


@pytest.mark.parametrize("optim", PUBLISHED, ids=lambda optim: optim.kind)
def test_one_process_is_the_reference_s(optim: OptimConfig) -> None:
    """As ``weft verify`` compares them: decay, groups and the learning rate too."""
    group = ParamGroupConfig(params="layers.1.*", lr_scale=0.5, weight_decay=0.3)
    case = Case("alone", shares=(6,))
    optim = optim.model_copy(update={"groups": (group,)})
    rehearsal = replace(case.rehearsal(), optim=optim)
    alone = rehearse(here, case.plan(), rehearsal)
    assert difference(by_reference(rehearsal, 6), alone).largest < TOLERANCE


def here(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """A rank in this process."""
    assert world_size == 1
    return [job(RankAddress(), *args)]


@pytest.mark.parametrize("optim", PUBLISHED, ids=lambda optim: optim.kind)
def test_checkpoints_go_from_split_to_split(
    optim: OptimConfig, pool: WorkerPool, tmp_path: Path
) -> None:
    """Rows and columns of several ranks are written once, and found by every piece of another."""
    (zero3,) = (case for case in SPLITS if case.zero == 3)
    rehearsal = replace(zero3.rehearsal(), optim=optim)
    plan = SPLITS[-1].plan()
    (expected, *_) = pool.run(save_halfway, plan, rehearsal, tmp_path, world_size=plan.world_size)
    for case in (zero3, SPLITS[0]):
        plan = case.plan()
        ranks = pool.run(load_halfway, plan, rehearsal, [tmp_path], world_size=plan.world_size)
        assert ranks[0] == [pytest.approx(expected, rel=1e-10)], case.name
    checkpoint = open_checkpoint(tmp_path)
    if optim.kind == "adafactor":
        assert set(checkpoint.kinds) == {"param", "row_var", "col_var", "mean_var", "variance"}
        assert checkpoint.shape("layers.0.attn.k.weight", "row_var") == (16,)
        assert float(checkpoint.read("layers.0.attn.k.weight", "row_var").min()) > 0
    else:
        assert set(checkpoint.kinds) == {"param", "momentum", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    "settings", [{}, {"eps": 1e-3, "min_rms": 0.5, "clip_threshold": 1.2, "beta2_decay": -0.5}]
)
def test_adafactor_is_pytorch_s(settings: dict[str, Any]) -> None:
    """A matrix and a vector, with decay; where the factor is 0 nothing is seen of the step."""
    optim = AdafactorConfig(lr=0.4, weight_decay=0.2, **settings)
    model, theirs = Two(), Two()
    optimizer = ours(optim, FACTORS, model)
    reference = torch.optim.Adafactor(
        theirs.parameters(),
        beta2_decay=optim.beta2_decay,
        eps=(optim.eps, optim.min_rms),
        d=optim.clip_threshold,
        weight_decay=0.0,  # this gradient path has none that decay
    )
    pytorch_s(reference, optim.lr, FACTORS, theirs)
    torch.testing.assert_close(model.matrix, theirs.matrix, **CLOSE)
    torch.testing.assert_close(model.vector, theirs.vector, **CLOSE)
    assert optimizer.num_updates == 3


def test_adafactor_of_a_stack_of_matrices_and_with_decay() -> None:
    """Each matrix has rows, columns and a mean of its own; the size is that of the stack."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2, 3, 4, generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.Adafactor([theirs], lr=0.3, weight_decay=0.1)
    optim = AdafactorConfig(lr=0.3)
    main, update, states = one_main(optim, start, weight_decay=0.1)
    for count in (1, 2):
        grad = torch.randn(2, 3, 4, generator=generator)
        theirs.grad, main.grad = grad.clone(), grad.clone()
        reference.step()
        update(count)
    torch.testing.assert_close(main.value, theirs.detach(), **CLOSE)
    assert {name: tuple(state.shape) for name, state in states.items()} == {
        "row_var": (2, 3), "col_var": (2, 4), "mean_var": (2,),
    }  # fmt: skip
    torch.testing.assert_close(states["row_var"].mean(-1), states["mean_var"], **CLOSE)


def one_main(optim: OptimConfig, start: Tensor, *, weight_decay: float, dtype: Any = None) -> Any:
    """A parameter of layer 0 that one rank has, an update of it by its number, and its states."""
    from weft.optim.registry import rule_of

    spec = ParamSpec(name="w", shape=tuple(start.shape), unit=0, init=Init("zeros"), decay=True)
    box = Box.whole(spec.shape)
    param = torch.nn.Parameter(start.to(dtype or start.dtype))
    main = MainParam(spec, box, start.clone(), param, owned=True)
    rule = rule_of(optim)
    states = {
        name: torch.zeros([spec.shape[d] for d in dims]) for name, dims in rule.state(spec).items()
    }
    group = Group([main], 1.0, weight_decay, {name: [state] for name, state in states.items()})
    comm, pieces = Comm(), {"w": [Held(spec, box, (0,))]}
    wholes = WholeTensors(pieces, comm, computed={"w": param.dtype}, updated=start.dtype)

    def update(count: int) -> None:
        number = torch.tensor(float(count))
        norms = TensorNorms(["w"], comm)
        rule.update(Update([group], optim.lr, number, torch.zeros(()), norms, wholes))

    return main, update, states


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_pytorch_s(shape: tuple[int, int], adjust: Any) -> None:
    """Which makes matrices orthogonal in bf16 always, as a model of bf16 does here."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(*shape, generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, adjust_lr_fn=adjust)
    optim = MuonConfig(lr=0.1, adjust_lr=adjust)
    main, update, states = one_main(optim, start, weight_decay=0.2, dtype=torch.bfloat16)
    for count in (1, 2, 3):
        grad = torch.randn(*shape, generator=generator)
        theirs.grad, main.grad = grad.clone(), grad.clone()
        reference.step()
        update(count)
    assert set(states) == {"momentum"}
    torch.testing.assert_close(main.value, theirs.detach(), **CLOSE)


def test_an_orthogonal_matrix_has_the_same_singular_vectors() -> None:
    """The polynomial acts on singular values alone, as a decomposition shows."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    x = values / values.square().sum().sqrt()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(orthogonal(matrix, 5), left @ x.diag() @ right)
    assert float(x.min()) > 0.6 and float(x.max()) < 1.3


def test_muon_leaves_tables_head_and_vectors_to_adamw() -> None:
    params = {spec.name: spec for spec in param_specs(SIZES["debug-1m"])}
    rule = Muon(MuonConfig())
    matrices = {name for name, spec in params.items() if is_matrix(spec)}
    assert {name.split(".", 2)[2] for name in matrices} == {
        *(f"attn.{x}.weight" for x in "qkvo"), *(f"ff.{x}.weight" for x in ("gate", "up", "down"))
    }  # fmt: skip
    assert set(rule.state(params["head.weight"])) == {"exp_avg", "exp_avg_sq"}
    assert set(rule.state(params["embed.weight"])) == {"exp_avg", "exp_avg_sq"}
    assert set(rule.state(params["layers.0.attn_norm.weight"])) == {"exp_avg", "exp_avg_sq"}


def test_predictions_know_what_is_kept() -> None:
    params = param_specs(SIZES["debug-1m"])
    total = sum(spec.numel for spec in params)
    in_layers = sum(spec.numel for spec in params if is_matrix(spec))
    muon = training_of(MuonConfig(), params).moments
    assert muon == pytest.approx((2 * total - in_layers) / total)
    factors = sum(sum(spec.shape) + 1 for spec in params if len(spec.shape) == 2)
    vectors = sum(spec.numel for spec in params if len(spec.shape) == 1)
    adafactor = training_of(AdafactorConfig(), params).moments
    assert adafactor == pytest.approx((factors + vectors) / total)
    assert adafactor < 0.02
