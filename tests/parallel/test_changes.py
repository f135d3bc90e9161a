"""Changes of activations beside compiled code."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.parallel.division import Division
from weft.parallel.runtime import AxisGroup, Lying
from weft.plan.layout import Shard


class Doubled(Division):
    """A change that talks to nobody."""

    def __init__(self) -> None: ...

    def gathered(self, x: Tensor) -> Tensor:
        return 2 * x

    def scattered(self, x: Tensor) -> Tensor:
        return 3 * x


class Block(nn.Module):
    """Two products and a change between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.register_forward_pre_hook(lambda _, args: (Doubled().gather(args[0]),))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).sin()


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_blocks_stop_before_a_change_and_go_on_after_it() -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    plain, compiled = Block(), Block()
    compiled.compile(backend=backend)
    x = torch.randn(3, 4)
    found = [block(x) for block in (plain, compiled)]
    assert torch.equal(*found)
    for each in found:
        each.sum().backward()
    for mine, theirs in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert len(graphs) > 1
    assert not [name for graph in graphs for name in graph if "mul" in name]


class Alone(Comm):
    """One rank of a group whose others send what the test says."""

    def __init__(self, rank: int, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.rank, self.others = rank, others

    def gather_parts(self, own: Tensor, sizes: Any, **_: Any) -> Any:
        parts = [own if n == self.rank else self.others[n] for n in range(len(sizes))]
        assert [tuple(part.shape) for part in parts] == [tuple(size) for size in sizes]
        return lambda: parts

    def reduce_scatter_parts(self, parts: Any, **_: Any) -> Any:
        return lambda: parts[self.rank]


ZIGZAG = ((range(1), range(3, 4)), (range(1, 3),))
EVEN = ((range(2),), (range(2, 4),))


@pytest.mark.parametrize("held", [ZIGZAG, EVEN])
def test_ranges_that_are_not_consecutive_come_into_their_places(held: Any) -> None:
    whole = torch.arange(12.0).view(3, 4)
    index = [torch.tensor([n for part in ranges for n in part]) for ranges in held]
    parts = {rank: whole[:, places] for rank, places in enumerate(index)}
    for rank, places in enumerate(index):
        group = AxisGroup(Alone(rank, parts), (0, 1))
        division = Division(group, Lying(Shard(1), held))
        own = parts[rank].clone().requires_grad_()
        assert torch.equal(division.gather(own), whole)
        division.gather(own).backward(whole)
        assert own.grad is not None and torch.equal(own.grad, whole[:, places])
        assert torch.equal(division.scattered(whole), whole[:, places])
        assert torch.equal(division.own_part(whole), whole[:, places])
        leaf = whole.clone().requires_grad_()
        division.own_part(leaf).sum().backward()
        term = torch.zeros_like(whole)
        term[:, places] = 1
        assert leaf.grad is not None and torch.equal(leaf.grad, term)


def test_parts_that_several_ranks_hold_are_no_division() -> None:
    lying = Lying(Shard(0), ((range(2),), (range(1, 3),)))
    with pytest.raises(AssertionError, match="parts have some in common"):
        Division(AxisGroup(Alone(0, {}), (0, 1)), lying)


def test_a_rank_does_not_import_the_compiler() -> None:
    """It would take its first step two seconds later."""
    code = """
import sys
import weft.train.worker
from train.test_build import built_with, losses
losses(built_with(), steps=1)
sys.exit("torch._dynamo" in sys.modules)
"""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "tests")))
    environment = os.environ | {"PYTHONPATH": paths}
    assert not subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode
