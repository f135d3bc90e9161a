"""Numbers as they travel: as they are, or rounded to fewer bits, each row with a scale of its own.

A row is all along the last dimension, such as the features of one token, wherever the other
dimensions are cut: so what is rounded to depends on no mesh, and on no microbatch. Of a flat tensor
it is so many elements after one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.parallel.fp8.rounding import Scaled, Spans, scaled
from weft.precision.casts import BLOCK, CASTS


@dataclass(frozen=True, slots=True)
class Code:
    """How tensors of one kind travel."""

    values: torch.dtype
    has_scales: bool = False
    """A byte behind each row is the exponent of its scale."""

    @staticmethod
    def named(cast: str) -> Code:
        """Of an entry of ``weft.precision.casts``, for sums of gradients: rows are short, so that
        they need no more exponents than activations."""
        return Code(vars(torch)[CASTS[cast].factors], has_scales=CASTS[cast].row_bytes > 0)

    @property
    def dtype(self) -> torch.dtype:
        """Of messages: bytes, where libraries of collectives know no numbers in eight bits."""
        return torch.uint8 if self.has_scales else self.values

    def size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Of the message for a tensor of this size."""
        return (*size[:-1], size[-1] + 1) if self.has_scales else size

    def encode(self, values: Tensor, into: Tensor) -> None:
        """Round ``values`` into a message. A row with infinity, or no number, becomes no numbers,
        so that the loss says so."""
        if not self.has_scales:
            into.copy_(values)
            return
        wide = torch.promote_types(values.dtype, torch.bfloat16)  # fp16 has too few exponents
        found = scaled(values.to(wide), self.values, Spans(whole=(-1,)))
        into[..., :-1] = found.values.view(torch.uint8)
        into[..., -1:] = found.scale.to(torch.float8_e8m0fnu).view(torch.uint8)

    def decode(self, came: Tensor, into: Tensor) -> None:
        """The numbers that were rounded to."""
        if not self.has_scales:
            into.copy_(came)
            return
        scale = came[..., -1:].view(torch.float8_e8m0fnu).float()
        wide = torch.promote_types(into.dtype, torch.bfloat16)
        into.copy_(Scaled(came[..., :-1].view(self.values), scale).exact(wide))

    def flat_size(self, numel: int) -> tuple[int, ...]:
        """Of the message for so many elements."""
        return self.size((-(-numel // BLOCK), BLOCK)) if self.has_scales else (numel,)

    def encode_flat(self, values: Tensor, into: Tensor) -> None:
        """Round a flat tensor into a message."""
        if self.has_scales:
            values = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        self.encode(values, into)

    def decode_flat(self, came: Tensor, into: Tensor) -> None:
        """The numbers that a flat tensor was rounded to."""
        if not self.has_scales:
            self.decode(came, into)
            return
        rows = torch.empty(len(came), BLOCK, dtype=into.dtype, device=into.device)
        self.decode(came, rows)
        into.copy_(rows.view(-1)[: len(into)])
