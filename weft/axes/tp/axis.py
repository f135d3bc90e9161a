"""Tensor parallelism in one dimension, with sequence parallelism between modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from weft.axes.axis import Axis, divisible
from weft.config.errors import ConfigError
from weft.plan.layout import Dim, Form, Partial, Replicate, Shard


class TensorParallel(Axis):
    """Divides the widths of modules inside them (heads, hidden channels, the vocabulary), and the
    sequence between."""

    name = "tp"
    changes = ((Shard, Replicate), (Partial, Shard), (Replicate, Shard))
    kinds = MappingProxyType(
        {
            "Linear": "RowLinear",
            "Embedding": "VocabEmbedding",
            "LinearCrossEntropy": "VocabCrossEntropy",
            "RowsLoss": "VocabRowsLoss",
            "Experts": "SplitExperts",
            "RMSNorm": "SplitNorm",
        }
    )

    in_pieces = True

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.width if form in ("param", "inner") else form == "stream" and dim.name == "seq"

    def part(
        self, dim: Dim, ways: int, position: int, shares: Sequence[int] = ()
    ) -> tuple[range, ...]:
        """Tokens between modules go as evenly as they can, whatever is computed inside them."""
        return super().part(dim, ways, position, shares if dim.width else ())

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        divided = self._divided(dims)
        if not any(self.divides(dim, "param") for dim in divided):  # all would compute all
            return ways == 1
        return ways >= 1 and all(divisible(dim, ways) for dim in divided)

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        divided = self._divided(dims)
        if self.allows(divided, ways):
            return
        if not any(self.divides(dim, "param") for dim in divided):
            hint = f"No parameter of the model has a dimension that {self.name} divides."
            raise ConfigError(key, ways, "1", hint)
        most = min(dim.num_groups * dim.units for dim in divided if not dim.shared)
        allowed = [n for n in range(1, most + 1) if self.allows(divided, n)]
        wrong = (dim for dim in divided if not divisible(dim, ways))
        words = sorted({dim.words for dim in wrong if dim.words})
        hint = f"The model's {', and its '.join(words)}." if words else ""
        raise ConfigError(key, ways, f"one of {', '.join(map(str, allowed))}", hint)

    def _divided(self, dims: Iterable[Dim]) -> list[Dim]:
        return [dim for dim in dims if dim.width or self.divides(dim, "stream")]


AXIS = TensorParallel()
