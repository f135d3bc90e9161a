"""Tokens on their way to experts of other ranks, and back: results, gradients, bytes by formula."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from parallel.test_casts import Rounded
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
from weft.nn.experts.grouped import Visit
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
    far: int
    """Choices that go over this rank between pairs of ranks."""
    counted: dict[str, Count]


def divided(address: RankAddress) -> dict[str, Found]:
    """One layer, forward and backward, with the experts divided, in several ways."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups(dict.fromkeys([EVERY, *(r for both in squared(EVERY, 2) for r in both)]))
    found = {
        "at once": one_layer(comm),
        "two steps": one_layer(comm, near=2),
        "pieces": one_layer(comm, near=2, pieces=5),
        "cast": one_layer(comm, cast="fp8"),
        "bf16": one_layer(comm, cast="bf16", pieces=2),
        "cast twice": one_layer(comm, near=2, cast="fp8"),
        "here": one_layer(comm, cast="fp8", cast_between="nodes"),
    }
    comm.members = [replace(each, node="aabb"[n]) for n, each in enumerate(comm.members)]
    found["far"] = one_layer(comm, near=2, cast="fp8", cast_between="nodes")
    comm.close()
    return found


def one_layer(comm: Comm, near: int = 1, pieces: int = 1, **cast: str) -> Found:
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
    group = AxisGroup(comm, EVERY, near_ways=near, **cast)
    experts.visits, experts.pieces = Exchange(Sum(group, (own,), tuple(PARTS), None)), pieces
    tokens = x[mine].requires_grad_()
    comm.counters.take()
    result, _ = experts(tokens)
    result.backward(grad[mine])
    grads = [tokens.grad, experts.gate.weight.grad, experts.down.weight.grad]
    counted = {name: comm.counters[name] for name in (COUNTS, TOKENS)}
    pairs = [slice(0, sum(SAMPLES_OF[:2])), slice(sum(SAMPLES_OF[:2]), None)]
    theirs, (opposite,) = pairs[comm.rank < 2], PARTS[comm.rank ^ 2]
    over = (chosen >= opposite.start) & (chosen < opposite.stop)
    far = over[pairs[comm.rank >= 2]].sum() + here[theirs].sum()
    return Found(result.detach(), grads, int(leave + come), int(far), counted)


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> list[dict[str, Found]]:
    return pool.run(divided, world_size=RANKS)


def test_each_token_visits_its_experts_wherever_they_are(ranks: list[dict[str, Found]]) -> None:
    """Uneven experts, one of them and one rank without tokens: as on one rank, and not a byte
    more than the choices that are computed on another."""
    experts, x, grad = whole()
    x.requires_grad_()
    expected, _ = experts(x)
    expected.backward(grad)
    flat = [each["at once"] for each in ranks]
    close = {"rtol": 0, "atol": 1e-11}
    torch.testing.assert_close(torch.cat([each.result for each in flat]), expected, **close)
    exact = [x.grad, experts.gate.weight.grad, experts.down.weight.grad]
    for number, whole_grad in enumerate(exact):
        parts = [each.grads[number] for each in flat]
        torch.testing.assert_close(torch.cat(parts), whole_grad, **close)
    for rank, found in enumerate(ranks):
        each, first, cut = (found[way] for way in ("at once", "two steps", "pieces"))
        torch.testing.assert_close([cut.result, *cut.grads], [each.result, *each.grads], **close)
        assert cut.counted[TOKENS].bytes == first.counted[TOKENS].bytes
        assert cut.counted[COUNTS].bytes == 5 * first.counted[COUNTS].bytes
        assert cut.counted[COUNTS].calls == first.counted[COUNTS].calls
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


def test_tokens_are_rounded_once_whatever_their_way(ranks: list[dict[str, Found]]) -> None:
    """In eight bits, in one step or two, as one process that rounds all of them; and as few bytes
    as that says. Nothing is rounded on one machine where only ways between machines are cast."""
    experts, x, grad = whole()
    exact, _ = experts(x)
    experts.visits = lambda ends: [rounding._replace(ends=each) for each in ends]
    x.requires_grad_()
    expected, _ = experts(x)
    expected.backward(grad)
    assert 0 < ((expected - exact).norm() / exact.norm()) < 3 * 2**-4
    wanted = [expected.detach(), x.grad, experts.gate.weight.grad, experts.down.weight.grad]
    for way in ("cast", "cast twice", "far"):
        found = [[each[way].result, *each[way].grads] for each in ranks]
        for whole_one, parts in zip(wanted, zip(*found, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(parts), whole_one, rtol=0, atol=1e-11)
    halves = torch.cat([each["bf16"].result for each in ranks])
    assert 0 < ((halves - exact).norm() / exact.norm()) < 3 * 2**-9
    for each in ranks:
        sent = {way: found.counted[TOKENS].bytes for way, found in each.items()}
        narrow, wide = D_MODEL + 1, D_MODEL * 8
        assert sent["cast"] == 2 * each["cast"].rows * narrow
        assert 4 * sent["bf16"] == sent["at once"] == sent["here"]
        assert wide * sent["cast twice"] == narrow * sent["two steps"]
        assert sent["two steps"] - sent["far"] == 2 * each["far"].far * (wide - narrow)
        assert torch.equal(each["here"].result, each["at once"].result)


rounding = Visit(torch.empty(0), *2 * (lambda rows: partial(Rounded.apply, rows),))  # both ways


class Noting(Comm):
    """One rank of two, whose other sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def exchange(self, parts: Sequence[Tensor], sizes: object, *, name: str, **_: object) -> Any:
        if name == COUNTS:
            return lambda: [parts[0], torch.zeros_like(parts[0])]
        self.noted.append(f"{len(parts[0])} leave")

        def arrived() -> list[Tensor]:
            self.noted.append(f"{len(parts[0])} are there")
            return [parts[0], parts[0][:0]]

        return arrived


ONE_PIECE = """
15 leave, shared, 15 are there, down, 15 leave, shared, 15 are there, backward,
15 leave, back through shared, 15 are there, back through down, 15 leave, back through shared,
15 are there
"""
TWO_PIECES = """
9 leave, 6 leave, shared, 9 are there, down, 9 leave, 6 are there, down, 6 leave, shared,
9 are there, 6 are there, backward,
6 leave, 9 leave, back through shared, 6 are there, back through down, 6 leave,
9 are there, back through down, 9 leave, back through shared, 6 are there, 9 are there
"""
"""A piece, or its gradient, is under way while the other or a shared expert is computed."""


@pytest.mark.parametrize(("pieces", "expected"), [(1, ONE_PIECE), (2, TWO_PIECES)])
def test_tokens_travel_while_others_are_computed(pieces: int, expected: str) -> None:
    comm = Noting()
    torch.manual_seed(0)
    experts = Experts(D_MODEL, D_FF, ExpertsSpec(count=EXPERTS, top_k=3, shared_d_ff=4), seq_len=1)
    for param in experts.parameters():
        torch.nn.init.normal_(param)
    own = range(EXPERTS)
    parts = ((own,), (range(EXPERTS, EXPERTS),))
    experts.visits = Exchange(Sum(AxisGroup(comm, (0, 1)), (own,), parts, None))
    experts.pieces = pieces
    for name in ("down", "shared"):
        experts.get_submodule(name).register_forward_hook(partial(note, comm.noted, name))
    x = torch.randn(5, 1, D_MODEL, requires_grad=True)
    y, _ = experts(x)
    comm.noted.append("backward")
    y.sum().backward()
    assert ", ".join(comm.noted) == " ".join(expected.split())


def note(noted: list[str], name: str, _module: object, _args: object, y: Tensor) -> None:
    noted.append(name)
    y.register_hook(lambda _: noted.append(f"back through {name}"))


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
        (
            dims,
            "at most 7, the model's experts. A rank without an expert would have nothing to do for "
            "the others: ranks that divide samples alone have the same experts.",
        ),
        (dims[1:], "1. It has no experts."),
        ([Dim(name=SAMPLES.name, size=7)], "at most the samples of a micro-batch (7)."),
    ):
        assert AXIS.allows(wrong, 1) and not AXIS.allows(wrong, EXPERTS + 1)
        with pytest.raises(ConfigError) as refused:
            AXIS.check(wrong, EXPERTS + 1, "plan.stages[0].ep")
        assert str(refused.value).startswith(f"plan.stages[0].ep = 8: expected {expected}")
