"""Changes of activations beside compiled code."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.parallel.tensor.changes import Division


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
