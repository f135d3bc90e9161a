"""Groups that are added to the optimizer of a woven model train as they do in a plain loop."""

from typing import Any

import numpy as np
import pytest
import torch
from test_weave_plans import PLANS, TOLERANCE, batch, squares, values
from torch import Tensor, nn

import weft
from weft.api.engine import WovenEngine
from weft.api.weave import woven
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan

STEPS = 5
ADDED = 2
"""The step before which the first layer comes to what is updated."""
BF16 = {"rtol": 0.05, "atol": 0.01}
"""Rounded to 8 bits in every product, over three updates of 0.05."""


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    return model, torch.optim.AdamW(model[2].parameters(), lr=0.02, eps=1e-3)


def first_layer(model: nn.Sequential) -> dict[str, Any]:
    return {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.5}


def plain() -> list[np.ndarray]:
    model, adamw = model_and_optimizer()
    for step in range(STEPS):
        if step == ADDED:
            adamw.add_param_group(first_layer(model))
        model.zero_grad()
        squares(model, batch(step)).mean().backward()
        adamw.step()
    return values(model)


def adds(comm: Comm, **settings: Any) -> tuple[WovenEngine, nn.Sequential]:
    model, adamw = model_and_optimizer()
    engine = woven(model, adamw, comm, **settings)
    for step in range(STEPS):
        if step == ADDED:
            engine.optimizer.add_param_group(first_layer(model))
        engine.step(batch(step))
    return engine, model


def adds_on_a_rank(address: RankAddress, plan: Plan) -> list[np.ndarray]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    _, model = adds(comm, loss=squares, plan=plan)
    comm.close()
    return values(model)


@pytest.mark.parametrize("name", PLANS)
def test_matches_a_plain_loop(name: str, pool: WorkerPool) -> None:
    plan, expected = PLANS[name], plain()
    for found in pool.run(adds_on_a_rank, plan, world_size=plan.world_size):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def in_bf16(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0].bfloat16()).float() - batch[1]).square()


def test_copies_in_a_higher_precision_are_updated_in_its_place() -> None:
    engine, model = adds(Comm(), loss=in_bf16, precision="bf16")
    added = engine.optimizer.param_groups[1]["params"]
    assert [value.dtype for value in added] == [torch.float32] * 2
    assert torch.equal(added[0].bfloat16(), model[0].weight)
    for one, other in zip(model.parameters(), plain(), strict=True):
        np.testing.assert_allclose(one.detach().float().numpy(), other, **BF16)


def test_what_was_added_is_saved_before_it_is_trained() -> None:
    """The state of an optimizer with as many groups fits."""
    states = []
    for _ in range(2):
        model, adamw = model_and_optimizer()
        engine = weft.weave(model, adamw, loss=in_bf16, precision="bf16")
        engine.optimizer.add_param_group(first_layer(model))
        if states:
            engine.load_state_dict(states[0])
        states.append(engine.state_dict())
        dtypes = {p.dtype for group in adamw.param_groups for p in group["params"]}
        assert dtypes == {torch.float32}


def test_what_cannot_be_added_is_refused_by_name() -> None:
    model, adamw = model_and_optimizer()
    engine = weft.weave(model, adamw, loss=in_bf16, precision="bf16")
    adamw.add_param_group({"params": model[2].bias})
    with pytest.raises(ConfigError, match=r"^optimizer = '2\.bias': expected parameters that it d"):
        engine.step(batch(0))
    adamw.param_groups.pop()
    adamw.add_param_group({"params": nn.Linear(3, 4).parameters()})
    with pytest.raises(ConfigError, match=r"^optimizer = 'a tensor of shape \[4, 3\]': expected"):
        engine.step(batch(0))
    adamw.param_groups.pop()
    engine.step(batch(0))
