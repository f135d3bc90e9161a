"""The checkpoint of a grown model, written part by part: memory holds a part of one tensor."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

from weft.checkpoint.draft import draft
from weft.checkpoint.entry import JSON, WIDTHS, Piece
from weft.checkpoint.place import Place
from weft.checkpoint.reader import Checkpoint
from weft.checkpoint.shard import DTYPE_CODES, DTYPES, bytes_of
from weft.grow.along import KINDS, Along, taken
from weft.grow.growth import Growth, Source, sources
from weft.models.registry import param_specs
from weft.nn.init import initial_values
from weft.plan.box import Box
from weft.plan.model import ParamSpec

PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a checkpoint."""

    place: Place
    kinds: list[str]
    """Those that the grown model has."""
    left_out: list[str]
    """Those that only the old one has: the optimizer begins anew where one is its."""


def write_grown(
    checkpoint: Checkpoint,
    growth: Growth,
    root: Place,
    *,
    seed: int,
    keep_moments: bool,
    report: Callable[[int, int], None],
) -> Written:
    """Make a checkpoint of step 0 of the grown model.

    Args:
        checkpoint: Of the old one.
        growth: From it.
        root: Where checkpoints of the grown one lie.
        seed: Of what is random: shares of copies, and parameters that start anew.
        keep_moments: What the optimizer keeps grows too, where that can be.
        report: Told how many bytes are made, and of how many.

    Raises CheckpointError: a file is damaged, or cannot be written.
    """
    made = _Made(checkpoint, growth, seed)
    kinds = made.kinds() if keep_moments else ["param"]
    pieces = [piece for kind in kinds for piece in made.pieces(kind)]
    total, done = sum(piece.nbytes for piece in pieces), 0

    def data(piece: Piece) -> memoryview:
        nonlocal done
        part = made.part(piece)
        done += piece.nbytes
        report(done, total)
        return bytes_of(part)

    state: dict[str, JSON] = {"step": 0, "samples": 0, "model": asdict(growth.new)}
    if len(kinds) > 1:
        state["updates"] = checkpoint.state["updates"]
    one = draft(root, 0, secrets.token_hex(8))
    one.begin()
    place = one.commit([one.write(0, pieces, data)], state)
    return Written(place, kinds, sorted(set(checkpoint.kinds) - set(kinds)))


class _Made:
    """The tensors of the grown model, from those of the old one."""

    def __init__(self, checkpoint: Checkpoint, growth: Growth, seed: int) -> None:
        self._old, self._growth, self._seed = checkpoint, growth, seed
        self._sources = sources(growth)
        self._specs = {param.name: param for param in param_specs(growth.new)}

    def kinds(self) -> list[str]:
        """Parameters, and of each optimizer's states those that can grow. An optimizer that treats
        parameters by their shapes (Muon) gives up its own where shapes get other dimensions."""
        kept = [kind for kind in KINDS if kind in self._old.kinds]
        names = self._old.names()
        fits = all(self._old.names(kind) == names for kind in kept)
        same = all(source and not source.is_stacked for source in self._sources.values())
        return kept if self._old.state.get("updates") and (fits or same) else ["param"]

    def pieces(self, kind: str) -> list[Piece]:
        """Rows of a tensor, as many as fit into a part."""
        found = []
        held = set(self._old.names(kind))
        first = self._old.names(kind)[0]
        for name, spec in self._specs.items():
            source = self._sources[name]
            if source is not None and source.name not in held:
                continue
            dtype = DTYPE_CODES[self._old.dtype(source.name if source else first, kind)]
            rows, rest = spec.shape[0], spec.shape[1:]
            step = max(1, PART_BYTES // (WIDTHS[dtype] * prod(rest)))
            for start in range(0, rows, step):
                zeros = (0,) * len(rest)
                box = Box((start, *zeros), (min(step, rows - start), *rest))
                found.append(Piece(name, kind, spec.shape, box, dtype))
        return found

    def part(self, piece: Piece) -> Tensor:
        """The elements of a piece, in its dtype."""
        source = self._sources[piece.name]
        return self._wide(piece, self._specs[piece.name], source).to(DTYPES[piece.dtype])

    def _wide(self, piece: Piece, spec: ParamSpec, source: Source | None) -> Tensor:
        """Likewise, in fp64."""
        if source is None and piece.kind == "param":
            return initial_values(self._seed, spec, piece.box, torch.float64)
        if source is None or source.is_blank:
            return torch.zeros(piece.box.size, dtype=torch.float64)
        first, *rest = source.along
        along = [first.rows(piece.box.offset[0], piece.box.size[0]), *rest]
        result = self._taken(source.name, source, along, piece.kind)
        if source.above != source.name:
            above = self._taken(source.above, source, along, piece.kind)
            for each in (each for each in along if each.role == "made"):
                further = each.is_further.view(each.shape_in(result.ndim))
                result = torch.where(further, above, result)
        if self._growth.uneven and piece.kind == "param":
            for each in (each for each in along if each.role == "read"):
                result *= 1 + self._growth.uneven * self._swing(result.shape, each, piece.key)
        return result

    def _taken(self, name: str, source: Source, along: list[Along], kind: str) -> Tensor:
        """Of one old parameter, of which no more rows are read than are used."""
        if source.is_stacked:
            return taken(self._old.read(name, kind)[None], along, kind)
        first, *rest = along
        low, high = int(first.origin.min()), int(first.origin.max()) + 1
        shape = self._old.shape(name, kind)[1:]
        box = Box((low, *(0 for _ in shape)), (high - low, *shape))
        return taken(self._old.read(name, kind, box), [first.after(low), *rest], kind)

    def _swing(self, shape: torch.Size, along: Along, key: str) -> Tensor:
        """Between -2 and 2, and zero on average over the copies of each element that is read: what
        they add up to stays, and gradients of copies differ."""
        digest = hashlib.blake2b(f"{self._seed}:{key}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        noise = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        old = int(along.origin.max()) + 1
        sums = noise.new_zeros(*shape[: along.dim], old).index_add_(along.dim, along.origin, noise)
        means = sums.index_select(along.dim, along.origin) / along.num_copies
        return noise - means
