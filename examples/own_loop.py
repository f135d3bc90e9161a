"""A plain loop, each process with its own part: torchrun --nproc-per-node 2 own_loop.py."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import weft

rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def batches(num_steps: int, size: int = 25) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points in the plane, and whether they lie inside the unit circle."""
    points = torch.randn(num_steps, size, 2, generator=torch.Generator().manual_seed(1))
    return [(x, (x.norm(dim=1) < 1).long()) for x in points]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
model = weft.distributed_model(model)
optimizer = weft.distributed_optimizer(adamw, model, max_grad_norm=1.0)

for x, y in batches(200):
    own_x, own_y = x[rank::world_size], y[rank::world_size]  # 25 samples: 13 and 12
    loss = F.cross_entropy(model(own_x), own_y)
    loss.backward()
    optimizer.step(weight=len(own_x))
    optimizer.zero_grad()

x, y = batches(1)[0]
with torch.no_grad():
    print(f"at the end: loss {F.cross_entropy(model(x), y).item():.6f}")
