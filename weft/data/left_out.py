"""Batches that a run leaves out, and so which batch each of its steps reads.

Batches are counted from 0 over the whole stream of samples. A run that leaves out none reads batch
t in step t (from 0); each that it leaves out brings what comes after it one step nearer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.data.batch import Batch, Dataset, DatasetSpec, Positions, as_positions


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Ranges of batches, both ends included, in their order; a batch lies between any two."""

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ranges: Iterable[Sequence[int]]) -> LeftOut:
        """In any order; they may overlap."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted((first, last) for first, last in ranges):
            assert 0 <= first <= last, f"batches {first} to {last}"
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        return LeftOut(tuple(joined))

    def batch(self, step: int) -> int:
        """What a step, counted from 0, reads."""
        for first, last in self.ranges:
            if step >= first:
                step += last - first + 1
        return step

    def and_also(self, first: int, last: int) -> LeftOut:
        """Without these, too."""
        return LeftOut.of([*self.ranges, (first, last)])


@dataclass(frozen=True)
class WithoutSpec:
    """A dataset whose positions pass over what is left out."""

    spec: DatasetSpec
    left_out: LeftOut
    global_batch: int
    """Samples of a batch."""

    def open(self) -> Dataset:
        return _Without(self.spec.open(), self)


@dataclass(frozen=True)
class _Without:
    dataset: Dataset
    asked: WithoutSpec

    def batch(self, positions: Positions) -> Batch:
        steps, places = np.divmod(as_positions(positions), self.asked.global_batch)
        batches = np.array([self.asked.left_out.batch(step) for step in steps.tolist()], np.int64)
        return self.dataset.batch(batches * self.asked.global_batch + places)
