"""Tensor parallelism in pieces: what is under way beside what, and whose rows are whose."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.models.registry import FAMILIES, build_stage
from weft.nn.context import Context
from weft.parallel.apply import apply_layout
from weft.parallel.runtime import AxisGroup, Lying
from weft.parallel.tp.pieces import InPieces
from weft.plan.layout import Shard
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan


class Noting(Comm):
    """One rank of two, the other of which sends zeros; notes what begins and what is awaited."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__(world_size=2)
        self.noted = noted

    def gather_parts(self, own: Tensor, sizes: Sequence[Any], **_: Any) -> Any:
        parts = [own, own.new_zeros(sizes[1])]
        return self._noted("gather", own, lambda: parts)

    def reduce_scatter_parts(self, parts: Sequence[Tensor], **_: Any) -> Any:
        return self._noted("scatter", parts[0], lambda: parts[0])

    def _noted(self, what: str, part: Tensor, arrived: Callable[[], Any]) -> Any:
        call = f"{what} {part.shape[1]}"  # pieces are told apart by their lengths
        self.noted.append(call)

        def result() -> Any:
            self.noted.append(f"wait for {call}")
            return arrived()

        return result


class Did(NamedTuple):
    noted: list[str]
    y: Tensor
    grad: Tensor


def a_block(family: str, pieces: int, backend: Any = None) -> Did:
    """What one rank of two does for a block, forward and backward, its own part 5 tokens long."""
    spec = next(iter(FAMILIES[family].sizes.values())).reduced()
    torch.manual_seed(1)
    model = build_stage(spec, range(1), embed=False, head=False).module
    mesh = Mesh.of((0, 1), tp=2)
    stage = StagePlan(mesh=mesh, layers=(0, 1), pieces=pieces)
    plan = Plan(
        num_layers=1, pipelines=(PipelinePlan(stages=(stage,), samples=1, microbatch=1),)
    ).rank_plan(0)
    noted: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and backend is None:
            module.register_forward_hook(note(noted, name.split(".")[-1]))
    layout = FAMILIES[family].layout(spec)
    apply_layout(model, layout, plan, Noting(noted), sizes={"seq": 10})
    if backend is not None:
        model.layers["0"].compile(backend=backend)
    x = torch.randn(1, 5, spec.d_model, requires_grad=True)
    y = model(x, Context(positions=torch.arange(10)[None]))
    noted.append("backward")
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape == y.shape
    return Did(noted, y, x.grad)


def note(noted: list[str], name: str) -> Any:
    def hook(_module: nn.Module, _args: Any, y: Tensor) -> None:
        noted.append(name)
        y.register_hook(lambda _: noted.append(f"back through {name}"))

    return hook


ONE_PIECE = """
gather 5, wait for gather 5, q, k, v, o, scatter 5, wait for scatter 5,
gather 5, wait for gather 5, gate, up, down, scatter 5, wait for scatter 5, backward,
gather 5, wait for gather 5, back through down, back through up, back through gate,
scatter 5, wait for scatter 5,
gather 5, wait for gather 5, back through o, back through v, back through k, back through q,
scatter 5, wait for scatter 5
"""
TWO_PIECES = """
gather 3, gather 2, wait for gather 3, q, k, v, wait for gather 2, q, k, v,
o, scatter 3, o, scatter 2, wait for scatter 3, wait for scatter 2,
gather 3, gather 2, wait for gather 3, gate, up, down, scatter 3,
wait for gather 2, gate, up, down, scatter 2, wait for scatter 3, wait for scatter 2, backward,
gather 2, gather 3, wait for gather 2, back through down, back through up, back through gate,
scatter 2, wait for gather 3, back through down, back through up, back through gate, scatter 3,
wait for scatter 2, wait for scatter 3,
gather 2, gather 3, wait for gather 2, back through o, wait for gather 3, back through o,
back through v, back through k, back through q, scatter 2,
back through v, back through k, back through q, scatter 3, wait for scatter 2, wait for scatter 3
"""
"""A piece is under way while products of the other are made, both ways."""


@pytest.mark.parametrize(("pieces", "expected"), [(1, ONE_PIECE), (2, TWO_PIECES)])
def test_a_piece_travels_while_another_is_computed(pieces: int, expected: str) -> None:
    found = a_block("llama", pieces).noted
    assert ", ".join(found) == " ".join(expected.split())


def test_all_gathers_begin_before_the_first_is_awaited() -> None:
    found = a_block("gpt2", 4).noted
    assert found[:6] == ["gather 2", *["gather 1"] * 3, "wait for gather 2", "q"]
    assert sum(each.startswith("gather") for each in found) == 4 * 4


ZIGZAG = ((range(2), range(6, 9)), (range(2, 6),))
EVEN = ((range(5),), (range(5, 9),))


class Told(Comm):
    """One rank of two, whose other sends what the test says."""

    def __init__(self, rank: int, parts: list[Tensor]) -> None:
        super().__init__()
        self.rank, self.parts, self.low = rank, parts, [0, 0]

    def gather_parts(self, own: Tensor, sizes: Sequence[Any], **_: Any) -> Any:
        found = []
        for rank, size in enumerate(sizes):
            low, self.low[rank] = self.low[rank], self.low[rank] + size[1]
            found.append(self.parts[rank][:, low : self.low[rank]])
        assert torch.equal(found[self.rank], own)
        return lambda: found

    def reduce_scatter_parts(self, parts: Sequence[Tensor], **_: Any) -> Any:
        return lambda: parts[self.rank]


@pytest.mark.parametrize("pieces", [2, 3, 5])
@pytest.mark.parametrize("held", [ZIGZAG, EVEN])
def test_rows_of_unequal_pieces_come_into_their_places(held: Any, pieces: int) -> None:
    """Also of a part that has fewer rows than there are pieces."""
    whole = torch.arange(36.0).view(2, 9, 2)
    index = [torch.tensor([n for part in ranges for n in part]) for ranges in held]
    parts = [whole[:, places] for places in index]
    for rank, places in enumerate(index):
        group = AxisGroup(Told(rank, parts), (0, 1), pieces)
        cut = InPieces(group, Lying(Shard(1), held))
        own = parts[rank].clone().requires_grad_()
        product, twice = cut.products([lambda x: x, lambda x: 2 * x], own)
        assert torch.equal(product, whole) and torch.equal(twice, 2 * whole)
        (product * whole).sum().backward()
        assert own.grad is not None and torch.equal(own.grad, whole[:, places])
        group.comm.low = [0, 0]  # type: ignore[attr-defined]
        assert torch.equal(cut.completed(lambda x: 2 * x, whole), 2 * whole[:, places])
        assert torch.equal(cut.through(lambda x: 2 * x, parts[rank]), 2 * whole[:, places])


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_blocks_compute_pieces_and_send_none() -> None:
    graphs: list[Counter[Any]] = []
    torch._dynamo.reset()  # one that has seen several lengths makes a graph for all

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(Counter(node.target for node in graph.graph.nodes))
        return graph.forward

    plain, compiled = (a_block("llama", 3, backend=each) for each in (None, backend))
    calls = ("gather", "scatter", "wait", "backward")
    assert [each for each in plain.noted if each.startswith(calls)] == compiled.noted
    torch.testing.assert_close((compiled.y, compiled.grad), (plain.y, plain.grad))
    feeds = [each[F.linear] for each in graphs if each[F.silu]]
    assert feeds == [3, 3], "each of the two lengths is one graph"
