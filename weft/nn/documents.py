"""Documents packed into one sample: where each begins, which is all that attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.platform.registry import PLATFORMS
from weft.platform.upload import upload


class Packed(NamedTuple):
    """What layers see of ``Documents``. Memory grows with the tokens, not with their square."""

    first: Tensor
    """``[batch, seq]`` int32: the place in its sample of the first token of a token's document."""
    borders: Tensor | None
    """``[documents + 1]`` int32: where documents begin in the samples one after the other, and the
    end. None where no kernel wants it."""
    end: Tensor | None = None
    """As ``ends``, where these are not all tokens."""
    places: Tensor | None = None
    """``[batch, seq]`` int64: which token of its sample is computed in each place, where that is
    not its own; all else here is in the order of the sample."""
    host: Packed | None = None
    """The same in the host's memory, without borders, where this is elsewhere or has ``places``."""

    @property
    def ends(self) -> Tensor:
        """``[batch, seq]``: one past the place of the last token of a token's document."""
        if self.end is not None:
            return self.end
        places = torch.arange(self.first.shape[1], dtype=torch.int32, device=self.first.device)
        return torch.searchsorted(
            self.first, places.expand_as(self.first).contiguous(), right=True, out_int32=True
        )

    def ending(self, places: range) -> Packed:
        """What the queries in these places of each sample see, of the keys up to the last of
        them."""
        return Packed(self.first[:, places.start : places.stop], None)

    def those(self, places: Sequence[range]) -> Packed:
        """What the queries in these places of each sample see of all keys, where they look both
        ways."""
        first, end = (
            torch.cat([x[:, part.start : part.stop] for part in places], dim=1)
            for x in (self.first, self.ends)
        )
        return Packed(first, None, end=end)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a micro-batch. Tokens see only earlier tokens of their own."""

    starts: npt.NDArray[np.bool_]
    """``[batch, seq]``, on the host: a token begins a document of its sample."""
    packed: Packed

    @classmethod
    def of(
        cls,
        segments: npt.NDArray[np.integer],
        device: torch.device | str,
        places: npt.NDArray[np.int64] | None = None,
    ) -> Documents:
        """Of ``[batch, seq]`` numbers of documents, equal for neighbours in the same one.

        A number that comes again after another one is another document. ``places``: as of
        ``Packed``.
        """
        starts = np.ones(segments.shape, dtype=np.bool_)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        where = None if places is None else torch.from_numpy(np.ascontiguousarray(places))
        return cls._of_starts(starts, where, torch.device(device))

    @classmethod
    def _of_starts(
        cls, starts: npt.NDArray[np.bool_], where: Tensor | None, device: torch.device
    ) -> Documents:
        places = np.where(starts, np.arange(starts.shape[1], dtype=np.int32), np.int32(0))
        first = torch.from_numpy(np.maximum.accumulate(places, axis=1))
        packed = Packed(upload(first, device), None)
        if where is not None or device.type != HOST:
            there = None if where is None else upload(where, device)
            packed = packed._replace(places=there, host=Packed(first, None, places=where))
        if device.type in PLATFORMS and PLATFORMS[device.type].has_varlen:
            ends = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
            borders = upload(torch.from_numpy(ends), device)
            # Every micro-batch has another number of documents; compiled blocks must not care.
            torch._dynamo.maybe_mark_dynamic(borders, 0)
            packed = packed._replace(borders=borders)
        return cls(starts, packed)

    def rows(self, rows: slice) -> Documents:
        """Of some of the samples."""
        host = self.packed.host
        where = None if host is None or host.places is None else host.places[rows]
        return self._of_starts(self.starts[rows], where, self.packed.first.device)
