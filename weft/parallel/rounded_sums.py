"""A bucket's gradients summed among ranks of one domain, in fewer bits on their way.

Each rank rounds what others sum of its gradients, a segment for each, and sends it there; they add
the terms in the order of ranks, in the dtype of the reduction, their own as it is. No library adds
in eight bits. Where all need the sums, those are rounded once more, and all go on with the same.
The codec, for whoever sends anything else in eight bits, is ``weft.parallel.casts.Code``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from weft.comm.comm import Comm, Finish
from weft.parallel.between import INSIDE
from weft.parallel.buckets import Bucket
from weft.parallel.casts import Code


class RoundedSums:
    """Of one bucket, on one rank."""

    def __init__(self, bucket: Bucket, comm: Comm) -> None:
        self._comm, self._near = comm, bucket.near(comm.rank)
        self._me = self._near.index(comm.rank)
        self._code = Code.named(bucket.entries[0].held.reduction)
        self._segments = bucket.segments(comm.rank)

    def scatter(self, flat: Tensor, own: Tensor) -> Finish:
        """Start to sum ``flat`` over the domain; this rank's segment of it goes to ``own``.

        Partial -> Shard. ``flat`` is not read any more, but for this rank's segment, which must not
        change until the result was called.
        """
        parts = flat.split(self._segments)  # type: ignore[no-untyped-call]
        messages = [
            self._message(part if place != self._me else part[:0])
            for place, part in enumerate(parts)
        ]
        mine = parts[self._me]
        size = self._code.flat_size(len(mine))
        sizes = [size if place != self._me else (0,) for place in range(len(self._near))]
        arrived = self._comm.exchange(messages, sizes, name=INSIDE, group=self._near)

        def finish() -> None:
            came, total = arrived(), torch.zeros_like(own)
            for place, message in enumerate(came):
                total.add_(mine if place == self._me else self._decoded(message, mine))
            own.copy_(total)

        return finish

    def everywhere(self, flat: Tensor) -> Finish:
        """Start to sum ``flat`` over the domain, in place.

        Partial -> Replicate. The way back begins when the result is called: all ranks call results
        in the order in which they began.
        """
        own = torch.empty_like(flat.split(self._segments)[self._me])  # type: ignore[no-untyped-call]
        first = self.scatter(flat, own)

        def finish() -> None:
            first()
            sizes = [self._code.flat_size(numel) for numel in self._segments]
            gather = partial(self._comm.gather_parts, name=INSIDE, group=self._near)
            came = gather(self._message(own), sizes)()
            for part, message in zip(flat.split(self._segments), came, strict=True):  # type: ignore[no-untyped-call]
                self._code.decode_flat(message, part)

        return finish

    def _message(self, part: Tensor) -> Tensor:
        message = part.new_empty(self._code.flat_size(len(part)), dtype=self._code.dtype)
        if len(part):
            self._code.encode_flat(part, message)
        return message

    def _decoded(self, message: Tensor, like: Tensor) -> Tensor:
        part = torch.empty_like(like)
        self._code.decode_flat(message, part)
        return part
