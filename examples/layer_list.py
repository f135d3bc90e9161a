"""A list of layers over any number of processes: torchrun --nproc-per-node 2 layer_list.py."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import weft

VOCAB, WIDTH, SAMPLES = 32, 24, 16


class Mixer(nn.Module):
    """Each place of a sequence looks at itself and at the place before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.norm(x)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        return x + self.inner(torch.cat([here, before], dim=-1)).tanh()


def head(embed: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.T


def batches(num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that count upwards, and what comes next in them."""
    starts = torch.randint(
        VOCAB, (num_steps, SAMPLES, 1), generator=torch.Generator().manual_seed(1)
    )
    tokens = (starts + torch.arange(9)) % VOCAB
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


layers = [
    weft.shared("embed", nn.Embedding, VOCAB, WIDTH),
    *[weft.Layer(Mixer, WIDTH) for _ in range(4)],
    weft.Layer(nn.LayerNorm, WIDTH),
    weft.shared("embed", nn.Embedding, VOCAB, WIDTH, forward=head),
]
engine = weft.weave_layers(
    layers,
    partial(torch.optim.AdamW, lr=0.01),
    loss=lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
    plan=weft.split(layers, "parameters", samples=SAMPLES, microbatch=4, schedule="zb-v"),
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=60)

for step, batch in enumerate(batches(60)):
    loss = engine.train_batch(batch, lr=schedule)
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.4f}")
print(f"at the end: loss {engine.eval_batch(batches(1)[0]).item():.4f}")
