"""The same loop over any number of processes: torchrun --nproc-per-node 2 woven_loop.py."""

import torch
from torch import nn
from torch.nn import functional as F

import weft


def batches(num_steps: int, size: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points in the plane, and whether they lie inside the unit circle."""
    points = torch.randn(num_steps, size, 2, generator=torch.Generator().manual_seed(1))
    return [(x, (x.norm(dim=1) < 1).long()) for x in points]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
woven = weft.weave(model, adamw, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))

for step, (x, y) in enumerate(batches(200)):
    loss = woven.step((x, y))
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.6f}")
