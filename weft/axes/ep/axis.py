"""Expert parallelism: each rank computes its own samples, and its own experts for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from types import MappingProxyType

from weft.axes.axis import Axis, check_samples, most_samples
from weft.config.errors import ConfigError
from weft.plan.layout import EXPERTS, SAMPLES, Dim, Form, places_at
from weft.plan.plan import StagePlan


class ExpertParallel(Axis):
    """Divides the samples of every activation, and of parameters the experts (arXiv 2006.16668).

    Whole experts, as evenly as they go. All else is on each rank, as along ``dp``.
    """

    name = "ep"
    kinds = MappingProxyType({"Experts": "elsewhere", "SplitExperts": "elsewhere"})
    near_key = "expert_ways"

    def near_ways(self, stage: StagePlan, nodes: Sequence[str]) -> int:
        return stage.expert_ways or _of_one_node(nodes)

    def pieces(self, stage: StagePlan) -> int:
        return stage.expert_pieces

    def divides(self, dim: Dim, form: Form) -> bool:
        if dim.name == EXPERTS:
            return form in ("param", "inner")
        return dim.name == SAMPLES.name and form != "param"

    def part(
        self, dim: Dim, ways: int, position: int, shares: Sequence[int] = ()
    ) -> tuple[range, ...]:
        if dim.places:
            own = [
                expert for expert, place in enumerate(dim.places) if position in places_at(place)
            ]
            return tuple(range(expert, expert + 1) for expert in own)
        return super().part(dim, ways, position, shares if dim.name == EXPERTS else ())

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        dims = list(dims)
        most = [self._most_experts(dims), most_samples(dims)]
        return 1 <= ways <= min((each for each in most if each is not None), default=ways)

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        dims = list(dims)
        most = self._most_experts(dims)
        if most is not None and ways > most:
            hint = "A rank without an expert would have nothing to do for the others: "
            hint += "ranks that divide samples alone have the same experts."
            expected = f"at most {most}, the model's experts" if most > 1 else "1"
            raise ConfigError(key, ways, expected, hint if most > 1 else "It has no experts.")
        check_samples(dims, ways, key)

    def _most_experts(self, dims: list[Dim]) -> int | None:
        """Of a model, where any of its dimensions are given."""
        counts = [dim.size for dim in dims if dim.name == EXPERTS]
        of_model = any(dim.name != SAMPLES.name for dim in dims)
        return max(counts, default=1) if of_model else None


def _of_one_node(nodes: Sequence[str]) -> int:
    """Neighbours on each of several machines; 1 where they are not as many on each."""
    names, sizes = zip(*((n, len(list(ranks))) for n, ranks in groupby(nodes)), strict=True)
    return sizes[0] if len({*names}) == len(names) > 1 and len({*sizes}) == 1 else 1


AXIS = ExpertParallel()
