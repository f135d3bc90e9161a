"""What a forward pass knows of its samples beside their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.nn.documents import Documents


@dataclass(frozen=True)
class Context:
    """One microbatch's places, documents and dropout keys. Every field may be left out."""

    positions: Tensor | None = None
    """``[batch or 1, seq]`` int64: the place of each token in its sample, or in its document.
    None: ``0 .. seq - 1``."""
    documents: Documents | None = None
    """Tokens attend only to earlier tokens of the same document. None: one document a sample."""
    dropout_keys: Tensor | None = None
    """``[batch]`` int64 from ``nn.dropout.dropout_keys``. None: no dropout (evaluation)."""

    def positions_of(self, x: Tensor) -> Tensor:
        """Positions for ``x`` ``[batch, seq, ...]``: ``[batch, seq]``, or ``[1, seq]``."""
        if self.positions is not None:
            return self.positions
        return torch.arange(x.shape[1], device=x.device)[None]

    def rows(self, rows: slice) -> Context:
        """What is known of some of the samples."""
        positions, documents, keys = self.positions, self.documents, self.dropout_keys
        return replace(
            self,
            positions=positions if positions is None or len(positions) == 1 else positions[rows],
            documents=None if documents is None else documents.rows(rows),
            dropout_keys=None if keys is None else keys[rows],
        )
