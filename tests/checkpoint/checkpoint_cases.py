"""Small checkpoints to save, damage and read: the same values for the same seed."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.shard import Shard, write_rank
from weft.checkpoint.store import begin, commit, prune, temporary
from weft.plan.box import Box

KINDS = ("param", "exp_avg")
SHAPES = {"embed.weight": (6, 8), "norm.weight": (8,)}
STATE = {"samples": 96, "seed": 7, "lr": 0.1 + 0.2, "name": "Zürich", "list": [1, [2.5, None]]}


def values(seed: int) -> dict[tuple[str, str], Tensor]:
    """Whole tensors by (kind, name)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(shape, generator=generator)
        for kind in KINDS
        for name, shape in SHAPES.items()
    }


def cut(kind: str, name: str, whole: Tensor, box: Box) -> Shard:
    return Shard(name, kind, tuple(whole.shape), box, whole[box.slices()])


def rank_shards(seed: int) -> list[list[Shard]]:
    """Two ranks, equal in bytes: each holds half of the matrix's columns and of the vector."""
    ranks: list[list[Shard]] = [[], []]
    for (kind, name), whole in values(seed).items():
        width = whole.shape[-1] // 2
        for rank in (0, 1):
            start, lead = rank * width, whole.shape[:-1]
            box = Box((*(0 for _ in lead), start), (*lead, width))
            ranks[rank].append(cut(kind, name, whole, box))
    return ranks


def save(root: Path, step: int, seed: int, keep: int | None = None) -> Path:
    """A save from begin to prune, as two ranks would do it. ``state`` tells the seed."""
    return save_shards(root, step, rank_shards(seed), {**STATE, "seed": seed}, keep)


def save_shards(
    root: Path,
    step: int,
    ranks: Sequence[Sequence[Shard]],
    state: Mapping[str, object] = STATE,
    keep: int | None = None,
) -> Path:
    begin(root, step)
    files = [write_rank(temporary(root, step), r, shards) for r, shards in enumerate(ranks)]
    folder = commit(root, step, files, state)
    if keep is not None:
        prune(root, keep)
    return folder


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the index and give it a right digest again, as someone hostile would."""
    path = folder / "index.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    path.write_text(json.dumps({**data, "sha256": digest}))
