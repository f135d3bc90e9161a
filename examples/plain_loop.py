"""A plain PyTorch training loop, in one process."""

import torch
from torch import nn
from torch.nn import functional as F


def batches(num_steps: int, size: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points in the plane, and whether they lie inside the unit circle."""
    points = torch.randn(num_steps, size, 2, generator=torch.Generator().manual_seed(1))
    return [(x, (x.norm(dim=1) < 1).long()) for x in points]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)

for step, (x, y) in enumerate(batches(200)):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    adamw.step()
    adamw.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.6f}")
