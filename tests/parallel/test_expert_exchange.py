"""Tokens on their way to experts of other ranks, and back: results, gradients, bytes by formula."""

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from weft.axes.ep.axis import ExpertParallel
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.counters import Count
from weft.comm.join import join
from weft.comm.members import Member
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.nn.experts.feed_forward import Experts
from weft.parallel.apply import axis_groups
from weft.parallel.ep.exchange import COUNTS, TOKENS, Exchange
from weft.parallel.runtime import AxisGroup, Sum, squared
from weft.plan.layout import SAMPLES, Dim
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan

EVERY = (0, 1, 2, 3)
RANKS, EXPERTS, TOP_K, D_MODEL, D_FF, SEQ = 4, 7, 2, 8, 5, 6
SAMPLES_OF = (3, 0, 1, 2)
"""By rank: one has nothing of its own."""
LEAST_LIKED = 3
"""An expert that no token goes to, alone on its rank with another."""
AXIS = ExpertParallel()
PARTS = [AXIS.part(Dim(name="experts", size=EXPERTS), RANKS, rank) for rank in range(RANKS)]


def whole() -> tuple[Experts, Tensor, Tensor]:
    """All experts, all tokens, and the gradient of the result."""
    torch.manual_seed(3)
    experts = Experts(D_MODEL, D_FF, ExpertsSpec(count=EXPERTS, top_k=TOP_K)).double()
    for param in experts.parameters():
        torch.nn.init.normal_(param)
    experts.router.weight.data[LEAST_LIKED] = 0
    x = torch.randn(sum(SAMPLES_OF), SEQ, D_MODEL, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 9
    experts.router.weight.data[:, 0] = 1.0 * (torch.arange(EXPERTS) != LEAST_LIKED)
    return experts, x, torch.randn_like(x)


class Found(NamedTuple):
    """Of one rank."""

    result: Tensor
    grads: list[Tensor]
    """Of the tokens and of its experts' weights."""
    rows: int
    """Choices of its tokens that are computed elsewhere, and of others' that are computed here."""
    counted: dict[str, Count]


def divided(address: RankAddress) -> dict[int, Found]:
    """One layer, forward and backward, with the experts divided, by how many exchange first."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups(dict.fromkeys([EVERY, *(r for both in squared(EVERY, 2) for r in both)]))
    found = {near: one_layer(comm, near) for near in (1, 2)}
    comm.close()
    return found


def one_layer(comm: Comm, near: int) -> Found:
    experts, x, grad = whole()
    first = sum(SAMPLES_OF[: comm.rank])
    mine = slice(first, first + SAMPLES_OF[comm.rank])
    (own,) = PARTS[comm.rank]
    with torch.no_grad():
        _, scores = experts.router(x)
    chosen = scores.topk(TOP_K).indices
    assert not (chosen == LEAST_LIKED).any(), "it was to be empty"
    here = (chosen >= own.start) & (chosen < own.stop)
    leave = (~here[mine]).sum()
    come = here.sum() - here[mine].sum()
    for name in ("gate", "up", "down"):
        part = experts.get_submodule(name)
        part.weight = torch.nn.Parameter(part.weight.data[own.start : own.stop].clone())
    group = AxisGroup(comm, EVERY, near_ways=near)
    experts.visit = Exchange(Sum(group, (own,), tuple(PARTS), None))
    tokens = x[mine].requires_grad_()
    comm.counters.take()
    result, _ = experts(tokens)
    result.backward(grad[mine])
    grads = [tokens.grad, experts.gate.weight.grad, experts.down.weight.grad]
    counted = {name: comm.counters[name] for name in (COUNTS, TOKENS)}
    return Found(result.detach(), grads, int(leave + come), counted)


def test_each_token_visits_its_experts_wherever_they_are(pool: WorkerPool) -> None:
    """Uneven experts, one of them and one rank without tokens: as on one rank, and not a byte
    more than the choices that are computed on another."""
    experts, x, grad = whole()
    x.requires_grad_()
    expected, _ = experts(x)
    expected.backward(grad)
    ranks = pool.run(divided, world_size=RANKS)
    flat = [each[1] for each in ranks]
    near = {"rtol": 0, "atol": 1e-11}
    torch.testing.assert_close(torch.cat([each.result for each in flat]), expected, **near)
    exact = [x.grad, experts.gate.weight.grad, experts.down.weight.grad]
    for number, whole_grad in enumerate(exact):
        parts = [each.grads[number] for each in flat]
        torch.testing.assert_close(torch.cat(parts), whole_grad, **near)
    for rank, (each, first) in enumerate((found[1], found[2]) for found in ranks):
        (own,) = PARTS[rank]
        there_and_back = 2 * each.rows * D_MODEL * 8  # and gradients the other ways
        assert each.counted[TOKENS].bytes == there_and_back
        assert each.counted[COUNTS].bytes == (EXPERTS - len(own)) * 8
        assert each.counted[COUNTS].messages == RANKS - 1
        pairs = zip([each.result, *each.grads], [first.result, *first.grads], strict=True)
        assert all(torch.equal(*both) for both in pairs), "not bit for bit"
        near, far = rank ^ 1, rank ^ 2  # the neighbour, and who is at this place in the other pair
        assert first.counted[COUNTS].messages == 2  # and far goes one, with those of both
        assert first.counted[COUNTS].peers == {near, far}
        assert first.counted[TOKENS].peers == {near, far}
        beside = sum(len(PARTS[place][0]) for place in (near, near ^ 2))
        assert first.counted[COUNTS].bytes == 8 * (beside + 2 * len(PARTS[far][0]))


@pytest.mark.parametrize(
    ("nodes", "near"), [("aabb", 2), ("aaaa", 1), ("abcd", 1), ("aaab", 1), ("abab", 1)]
)
def test_neighbours_are_those_of_one_machine(nodes: str, near: int) -> None:
    """Where there are as many on each; and what a stage says is what counts."""
    stage = StagePlan(mesh=Mesh.of(range(4), ep=4), layers=(0, 1))
    assert AXIS.near_ways(stage, nodes) == near
    assert AXIS.near_ways(replace(stage, expert_ways=1), nodes) == 1
    members = [Member(node=node) for node in nodes]
    plan = Plan(num_layers=1, pipelines=(PipelinePlan(stages=(stage,), samples=4, microbatch=4),))
    pairs = {*chain(*squared(EVERY, 2))} if near == 2 else set()
    assert {*axis_groups(plan, members)} == {EVERY, *pairs}


def test_each_rank_has_an_expert_and_a_sample() -> None:
    dims = [Dim(name="experts", size=EXPERTS), Dim(name="d_ff", size=4, width=True)]
    assert [len(own) for (own,) in PARTS] == [2, 2, 2, 1]
    AXIS.check(dims, EXPERTS, "plan.stages[0].ep")
    for wrong, expected in (
        (dims, "at most 7, the model's experts. A rank without an expert would have nothing"),
        (dims[1:], "1. It has no experts."),
        ([Dim(name=SAMPLES.name, size=7)], "at most the samples of a micro-batch (7)."),
    ):
        assert AXIS.allows(wrong, 1) and not AXIS.allows(wrong, EXPERTS + 1)
        with pytest.raises(ConfigError) as refused:
            AXIS.check(wrong, EXPERTS + 1, "plan.stages[0].ep")
        assert str(refused.value).startswith(f"plan.stages[0].ep = 8: expected {expected}")
