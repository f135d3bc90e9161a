"""Samples of a batch given out by the work that their documents make.

Samples are equally long and their documents are not: attention takes as many products as a document
has pairs of tokens, so a sample of one long document is more work than one of many short ones. Here
ranks get as many samples of a batch as the plan says, and which ones so that their work goes by
that number; then each its micro-batches likewise. Ranks that divide samples' tokens get these by
work too (``inside``). What a step trains on stays: only the order in which sums are added is
another.

Nothing is sent for it. Lengths come from the index of documents, which every rank has beside the
tokens, for samples of other ranks too, and from the same lengths all come to the same. The
processes that make batches ahead do it while a step trains.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import numpy.typing as npt

from weft.config.errors import ConfigError
from weft.data.batch import Batch, DatasetSpec, Positions, as_positions
from weft.data.dataset import PackedDataset, PackedSpec
from weft.data.hashing import Int64Array
from weft.data.inside import Slots, places_by_work, shares, slots_of
from weft.data.left_out import WithoutSpec
from weft.plan.plan import Plan
from weft.precision.registry import PRECISIONS

Part = tuple[range, ...]
"""Places inside a global batch, of each micro-batch that ranks compute together."""
Parts = tuple[tuple[Part, ...], ...]
"""By site, that no sample leaves."""

_EXCHANGES, _TRIED = 8, 4
"""Exchanges of samples at most, for each part; and with how many others each is tried."""


@dataclass(frozen=True, kw_only=True)
class EvenSpec:
    """A dataset that gives samples out by work."""

    spec: PackedSpec
    parts: Parts
    token: int
    """What a token costs beside attention, in pairs of tokens."""
    slots: Slots = ()
    """Of the ranks that divide samples' tokens; none do."""

    @property
    def global_batch(self) -> int:
        """Samples of a batch."""
        return sum(len(places) for part in _parts(self.parts) for places in part)

    def open(self) -> Even:
        return Even(self.spec.open(), self)


@dataclass(frozen=True)
class Even:
    """It is asked for places in batches, and gives the samples that belong there."""

    dataset: PackedDataset
    asked: EvenSpec

    def batch(self, positions: Positions) -> Batch:
        """The samples of these positions, each of which may be another one of its own batch."""
        size = self.asked.global_batch
        wanted = as_positions(positions)
        numbers, places = np.divmod(wanted, size)
        found, evened, parts = np.empty_like(wanted), None, self.asked.parts
        inside = np.empty((len(wanted), self.asked.spec.seq_len), np.int64)
        for number in np.unique(numbers).tolist():
            work, mine = self.work(number), numbers == number
            order = given_out(work, parts)
            before, after = work, work
            if self.asked.slots:
                of_samples, before, after = self.divided(number)
                inside[mine] = of_samples[order[places[mine]]]
            evened = np.array([imbalance(each, parts) for each in (before, after[order])])
            found[mine] = number * size + order[places[mine]]
        moved = inside if self.asked.slots else None
        return replace(self.dataset.batch(found), evened=evened, places=moved)

    def work(self, number: int) -> Int64Array:
        """Of each sample of a batch, in pairs of tokens."""
        size = self.asked.global_batch
        pairs = self.dataset.pairs(np.arange(number * size, (number + 1) * size))
        return pairs + self.asked.token * self.asked.spec.seq_len

    def divided(self, number: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Of each sample of a batch the places of its tokens ``[samples, seq]``, and the work
        ``[samples, ranks]`` of those that divide them: by length, and so."""
        size, asked = self.asked.global_batch, self.asked
        in_order, found = np.arange(asked.spec.seq_len), []
        for lengths in self.dataset.lengths(np.arange(number * size, (number + 1) * size)):
            places = places_by_work(lengths.tolist(), asked.slots)
            each = (shares(lengths, asked.slots, asked.token, x) for x in (in_order, places))
            found.append((places, *each))
        places, before, after = map(np.stack, zip(*found, strict=True))
        return places, before, after


def parts_of(plan: Plan) -> Parts:
    """Who computes what: of each pipeline by its stage that divides samples most finely."""
    sites = plan.sites or (plan.ranks,)
    found: list[list[Part]] = [[] for _ in sites]
    start = 0
    for pipeline in plan.pipelines:
        numbers = range(pipeline.num_microbatches)
        of_stages = []
        for stage, each in enumerate(pipeline.stages):
            split = [pipeline.split(stage, number) for number in numbers]
            of_ranks = (
                tuple(_moved(split[n][rank], start + n * pipeline.microbatch) for n in numbers)
                for rank in each.mesh.ranks
            )
            of_stages.append([part for part in dict.fromkeys(of_ranks) if sum(map(len, part))])
        first = pipeline.stages[0].mesh.ranks[0]
        site = next(number for number, ranks in enumerate(sites) if first in ranks)
        finest = max(of_stages, key=len)
        found[site] += finest
        start += pipeline.samples
    return tuple(map(tuple, found))


def evenly(spec: PackedSpec, plan: Plan, token: int) -> EvenSpec:
    """A dataset whose samples, and their tokens, are given out by work to a plan's ranks."""
    slots = slots_of(plan, spec.seq_len)
    return EvenSpec(spec=spec, parts=parts_of(plan), token=token, slots=slots)


def following(spec: DatasetSpec, plan: Plan) -> DatasetSpec:
    """The same dataset for another plan."""
    if isinstance(spec, WithoutSpec):
        return replace(spec, spec=following(spec.spec, plan))
    return evenly(spec.spec, plan, spec.token) if isinstance(spec, EvenSpec) else spec


def refuse_one_part(plan: Plan, seq_len: int) -> None:
    """``data.balance_documents`` has ranks to balance.

    Raises:
        ConfigError: it has not.
    """
    if all(len(site) < 2 for site in parts_of(plan)) and not slots_of(plan, seq_len):
        hint = "One rank computes whole batches, and nobody waits for it. Of ranks that divide "
        hint += "samples' tokens only processors get these by work."
        raise ConfigError("data.balance_documents", True, "false", hint)


def refuse_cut_blocks_by_work(plan: Plan, seq_len: int) -> None:
    """A block of tokens, which has one scale, has the tokens that one process has in it.

    Raises:
        ConfigError: ranks that divide samples' tokens get them by work.
    """
    for _, _, stage in plan.stages():
        products = PRECISIONS[stage.precision].products
        if products is not None and products.scaling == "blockwise" and slots_of(plan, seq_len):
            expected = f"false where ranks divide samples' tokens in precision {stage.precision}"
            hint = f"Other tokens would be in its blocks of {products.block}. "
            hint += "Precision fp8-rowwise has no blocks."
            raise ConfigError("data.balance_documents", True, expected, hint)


def given_out(work: Int64Array, parts: Parts) -> Int64Array:
    """Which sample of a batch goes to each place in it. Whatever is equal goes by place."""
    order = np.empty_like(work)
    for site in parts:
        own = np.sort(np.concatenate([_places(part) for part in site]))
        for part, numbers in zip(site, shared_out(work[own], list(map(_size, site))), strict=True):
            mine = own[numbers]
            many = shared_out(work[mine], [len(places) for places in part])
            for places, some in zip(part, many, strict=True):
                order[places.start : places.stop] = mine[some]
    return order


def shared_out(work: Int64Array, sizes: Sequence[int]) -> list[Int64Array]:
    """Numbers of what each of several gets, ascending: so many as ``sizes``, and of all the work
    its part by that number.

    The greatest first, each to whom most is lacking (Graham, 1969); then what one has too much of
    is exchanged, as long as the greatest becomes less.
    """
    if len(sizes) == 1:
        return [np.arange(work.size)]
    scale = lcm(*(size for size in sizes if size))
    weights = [scale // size if size else 0 for size in sizes]
    found: list[list[int]] = [[] for _ in sizes]
    loads = [0] * len(sizes)
    free = [(0, number) for number, size in enumerate(sizes) if size]
    for item in np.argsort(-work, kind="stable").tolist():
        _, number = heapq.heappop(free)
        found[number].append(item)
        loads[number] += int(work[item])
        if len(found[number]) < sizes[number]:
            heapq.heappush(free, (loads[number] * weights[number], number))
    return [np.sort(each) for each in _exchanged(work, found, loads, weights)]


def _exchanged(
    work: Int64Array, found: list[list[int]], loads: list[int], weights: list[int]
) -> list[Int64Array]:
    """After exchanges of one for one between who has most and others, those with least first."""
    kept = [np.array(each, np.int64) for each in found]
    some = [number for number, each in enumerate(kept) if each.size]
    for _ in range(_EXCHANGES * len(some)):
        by_load = sorted(some, key=lambda number: loads[number] * weights[number])
        most = by_load.pop()
        for other in by_load[:_TRIED]:
            above = loads[most] * weights[most] - loads[other] * weights[other]
            wanted = above // (weights[most] + weights[other])
            moved = work[kept[most]][:, None] - work[kept[other]][None, :]
            row, column = np.unravel_index(np.abs(moved - wanted).argmin(), moved.shape)
            less = int(moved[row, column])
            if less > 0 and less * weights[other] < above:
                break
        else:
            break
        kept[most][row], kept[other][column] = kept[other][column], kept[most][row]
        loads[most] -= less
        loads[other] += less
    return kept


def imbalance(work: Int64Array, parts: Parts) -> float:
    """Of the parts of all sites the most work a sample, over the mean; where there is one part, of
    its micro-batches. ``work`` ``[samples]``, or ``[samples, ranks]`` that divide each."""
    every = _parts(parts)
    places = [_places(part) for part in every]
    if len(every) == 1:
        places = [np.arange(each.start, each.stop) for each in every[0] if each]
    return max(float(work[each].mean(0).max()) for each in places) / float(work.mean())


def _parts(parts: Parts) -> list[Part]:
    return [part for site in parts for part in site]


def _places(part: Part) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(each.start, each.stop) for each in part])


def _size(part: Part) -> int:
    return sum(map(len, part))


def _moved(places: range, by: int) -> range:
    return range(by + places.start, by + places.stop)
