"""Which text is held out for evaluation: a hash decides, the same on every machine.

A document is held out when the hash of its identity, as a fraction of 2**64, is below the part
asked for. The identity of a file is its path inside the source, so editing it does not move it;
that of a row (JSONL, Parquet, token files) is its content, so neither its place nor a copy of it
matters: duplicates never end up on both sides. Neither depends on the seed: all runs share one
held-out set.

A source of fewer than 20 documents is cut into blocks first, and each block is hashed by its
document and number: that is how a single text file gets a held-out part. Consecutive blocks on
one side stay one document.

Where chance leaves a side empty, the limit moves just enough to give it one document (or block).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.data.hashing import identity_hash

STREAM_BYTES = 1 << 20
"""Whole documents are read and tokenized in pieces of this size."""
BLOCK_BYTES = 1 << 16
"""Largest block of a source with few documents; a small source has smaller ones."""
SMALLEST_BLOCK_BYTES = 1 << 9
FEW_DOCUMENTS = 20


@dataclass(frozen=True)
class Split:
    """How the documents of one source divide into a training and a held-out part."""

    limit: int
    """Identities below it, out of 2**64, are held out; 0 holds out nothing."""
    by_block: bool
    """Blocks are hashed one by one, not documents as a whole."""
    unit: int
    """Bytes of a document that are read, and decided on, as one."""

    def held_out(self, identity: int, block: int) -> bool:
        """Whether a block of the document with this identity is held out."""
        return (block_identity(identity, block) if self.by_block else identity) < self.limit


def block_identity(identity: int, block: int) -> int:
    """The identity of a numbered block of a document."""
    return identity_hash(identity.to_bytes(8, "little"), block.to_bytes(8, "little"))


def choose_limit(identities: Iterable[int], held_out: float, enough: int) -> int | None:
    """The limit below which identities are held out, so that neither side is empty.

    Reads no further than it must: until ``enough`` identities were seen and both sides have one.
    The result depends on the set of identities, not on their order.

    Returns:
        None: fewer than ``enough`` identities, or all of them are equal.
    """
    assert 0 < held_out < 1, f"held out {held_out}"
    limit = int(held_out * 2.0**64)
    low, high, seen = 2**64, -1, 0
    for identity in identities:
        low, high, seen = min(low, identity), max(high, identity), seen + 1
        if seen >= enough and low < limit <= high:
            return limit
    if seen < enough or low >= high:
        return None
    return low + 1 if limit <= low else high


def block_bytes(total_bytes: int) -> int:
    """Block size for a source of few documents: a power of two, so that it rarely changes."""
    wanted = max(total_bytes // FEW_DOCUMENTS, 1)
    return min(max(1 << (wanted.bit_length() - 1), SMALLEST_BLOCK_BYTES), BLOCK_BYTES)
