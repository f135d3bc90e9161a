"""All ranks of a job at once, by a tree of small groups.

What every rank must hear is small and goes to all: totals of a step, whether somebody failed. In
one group of n ranks each would hold a connection to n - 1 others; here it has some to its
neighbours, and few ranks more to those of the next level. Equal answers travel as one.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.counters import Count
from weft.comm.transport import NativeGroup

FAN = 16
"""Ranks of a group at most; a job of no more has one group, of all ranks."""

PLAIN = 64
"""Characters of a text that are sent as they are, rather than a digest of them first."""
Said = dict[str, list[list[int]]]
"""Texts, and the numbers of the first and the last of each run of ranks that said them."""


def blocks(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of each group that a rank is in, from its neighbours up.

    It is the first of every group but its last, where it stands for all that it is first of.
    """
    found, stride = list[tuple[int, ...]](), 1
    while stride < world_size:
        width = stride * FAN
        first = rank - rank % width
        found.append(tuple(range(first, min(first + width, world_size), stride)))
        if rank != first:
            break
        stride = width
    return found


class Tree:
    """The groups of one rank, and what goes through them. Every method is collective.

    Args:
        world: All ranks, ascending.
        open_group: Opens the group of some of the ranks, over tensors in host memory.
    """

    def __init__(
        self,
        rank: int,
        world: Sequence[int],
        open_group: Callable[[tuple[int, ...]], NativeGroup],
    ) -> None:
        self._rank, self._number, self._world_size = rank, world.index(rank), len(world)
        mine, top = blocks(self._number, len(world)), blocks(0, len(world))[-1]
        levels = [tuple(world[number] for number in block) for block in mine if len(block) > 1]
        self._levels = [(ranks, open_group(ranks)) for ranks in levels]
        self._top = tuple(world[number] for number in top)
        """Its ranks have heard of all ranks, and tell the others."""
        self._count = Count()

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> None:
        """Sum, or take the largest, in place."""
        host = tensor.cpu()
        for ranks, group in self._levels:
            self._reduce(ranks, group, host, largest=largest)
        self._down(host)
        tensor.copy_(host)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy what the first rank has into every rank's tensor."""
        host = tensor.cpu()
        if self._levels[-1][0] == self._top:
            self._levels[-1][1].broadcast(host, self._top[0])()
        self._down(host)
        tensor.copy_(host)

    def gather_json(self, text: str) -> list[Any]:
        """The values of every rank's JSON. Only long texts that differ are exchanged."""
        key = text if len(text) <= PLAIN else f"#{hashlib.sha256(text.encode()).hexdigest()}"
        keys = self.gather(key)
        first = {key: rank for rank, key in reversed(list(enumerate(keys)))}
        long = [key for key in first if key.startswith("#")]
        texts = {key: key for key in first} | {key: text}
        if len(first) > 1 and long:
            told = self.gather(text if first[key] == self._number else "")
            texts |= {key: told[first[key]] for key in long}
        values = {key: json.loads(text) for key, text in texts.items()}
        return [values[key] for key in keys]

    def gather(self, text: str) -> list[str]:
        """What every rank said, in rank order, on every rank."""
        said: Said = {text: [[self._number, self._number]]}
        for ranks, group in self._levels:
            said = _merged(map(_unpacked, self._gathered(ranks, group, _packed(said))))
        said = self._told(said)
        texts = dict[int, str]()
        for each, runs in said.items():
            for first, last in runs:
                texts.update(dict.fromkeys(range(first, last + 1), each))
        return [texts[rank] for rank in range(len(texts))]

    def take(self) -> Count:
        """What this rank sent since the last time."""
        count, self._count = self._count, Count()
        return count

    def _told(self, said: Said) -> Said:
        """What the ranks at the top know."""
        if len(self._top) == self._world_size:
            return said
        packed = _packed(said)
        size = torch.tensor([len(packed)])
        self._down(size)
        heard = self._levels[-1][0] != self._top
        table = torch.empty(int(size), dtype=torch.uint8) if heard else _bytes(packed)
        self._down(table)
        return _unpacked(table.numpy().tobytes()) if heard else said

    def _gathered(self, ranks: tuple[int, ...], group: NativeGroup, mine: bytes) -> list[bytes]:
        """Of every rank of a group."""
        number = ranks.index(self._rank)
        sizes = torch.zeros(len(ranks), dtype=torch.int64)
        sizes[number] = len(mine)
        self._reduce(ranks, group, sizes)
        table = torch.zeros(len(ranks), int(sizes.max()), dtype=torch.uint8)
        table[number, : len(mine)] = _bytes(mine)
        self._reduce(ranks, group, table)
        rows = table.numpy()
        return [rows[row, : int(size)].tobytes() for row, size in enumerate(sizes.tolist())]

    def _reduce(
        self, ranks: tuple[int, ...], group: NativeGroup, tensor: Tensor, *, largest: bool = False
    ) -> None:
        messages = 2 * (len(ranks) - 1)
        self._sent(ranks, messages, messages / len(ranks) * tensor.nbytes)
        group.all_reduce(tensor, largest=largest)()

    def _down(self, tensor: Tensor) -> None:
        """From the ranks at the top, which have what they reduced, to every other."""
        for ranks, group in reversed(self._levels):
            if ranks == self._top:
                continue
            if ranks[0] == self._rank:
                self._sent(ranks, 1, tensor.nbytes)
            group.broadcast(tensor, ranks[0])()

    def _sent(self, ranks: tuple[int, ...], messages: int, num_bytes: float) -> None:
        self._count.add(Count(0, messages, num_bytes, set(ranks) - {self._rank}))


def _merged(parts: Iterable[Said]) -> Said:
    """Of groups of ranks in their order."""
    merged: Said = {}
    for text, runs in (item for part in parts for item in part.items()):
        known = merged.setdefault(text, [])
        for first, last in runs:
            if known and known[-1][1] + 1 == first:
                known[-1][1] = last
            else:
                known.append([first, last])
    return merged


def _packed(said: Said) -> bytes:
    return zlib.compress(json.dumps(said, separators=(",", ":")).encode(), 1)


def _unpacked(packed: bytes) -> Said:
    said: Said = json.loads(zlib.decompress(packed))
    return said


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
