"""Context parallelism: each rank computes its places of every sample with all parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from weft.axes.axis import Axis, consecutive
from weft.config.errors import ConfigError
from weft.plan.layout import Dim, Form, Replicate, Shard
from weft.plan.plan import StagePlan


class ContextParallel(Axis):
    """Divides the sequence in all of the model, and no parameter.

    The sequence is cut into twice as many parts as there are ranks, and a rank has one from the
    start and one as far from the end: queries see the keys before them, so that is as much work for
    each (zigzag, as in the training of Llama 3, arXiv 2407.21783).
    """

    name = "cp"
    changes = ((Replicate, Shard),)
    kinds = MappingProxyType(
        {
            "Attention": "own_queries",
            "LatentAttention": "own_queries",
            "Balance": "OwnTokens",
            "LargeLogits": "OwnTerm",
            "LinearCrossEntropy": "OwnTargets",
            "VocabCrossEntropy": "OwnTargets",
        }
    )

    otherwise = (
        "Attention whose queries see keys from one place up to another has one: causal or both "
        "ways, of all or inside documents. With another mask, divide heads or layers instead."
    )

    near_key = "head_ways"

    def near_ways(self, stage: StagePlan, nodes: Sequence[str]) -> int:  # noqa: ARG002
        return stage.head_ways

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form in ("stream", "inner")

    def part(
        self,
        dim: Dim,
        ways: int,
        position: int,
        shares: Sequence[int] = (),  # noqa: ARG002
    ) -> tuple[range, ...]:
        if ways == 1:
            return (range(dim.size),)
        places = (position, 2 * ways - 1 - position)
        early, late = (consecutive(dim, 2 * ways, place) for place in places)
        joined = (range(early.start, late.stop),) if early.stop == late.start else (early, late)
        return tuple(part for part in joined if part) or (early,)

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return ways >= 1 and (ways == 1 or not any(n % (2 * ways) for n in self._lengths(dims)))

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        dims = list(dims)
        if not self.allows(dims, ways):
            allowed = [str(n) for n in range(1, 2 * ways + 1) if self.allows(dims, n)]
            many = " and ".join(map(str, self._lengths(dims)))
            hint = f"Each rank has two parts of a sample of {many} tokens, and all parts are equal."
            raise ConfigError(key, ways, f"one of {', '.join(allowed)}", hint)

    def _lengths(self, dims: Iterable[Dim]) -> list[int]:
        return sorted({dim.size for dim in dims if dim.size and self.divides(dim, "stream")})


AXIS = ContextParallel()
